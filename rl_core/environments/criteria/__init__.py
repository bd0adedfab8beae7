"""Kinds of rubric criteria: graders of a finished trajectory, in one table.

A criterion's value is in [0, 1]. A grader that cannot do its work raises; it never answers with a score. Text that a
policy wrote is data here: it is parsed and matched, never run, except inside a sandbox; and it is run there from what
was exported, after the episode, in a sandbox of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rl_core.environments.criteria.graded import Graded, NoParams, Params, Verdict
from rl_core.environments.criteria.judge import JudgeParams, judge
from rl_core.environments.criteria.kinds import WATCHED, CriterionKind
from rl_core.environments.criteria.oracles import (
    HiddenTestsParams,
    OracleParams,
    defined_functions,
    defines_function,
    hidden_tests,
    impossible_passed,
    test_gap,
    visible_tests,
)
from rl_core.environments.criteria.outside import Outside
from rl_core.environments.criteria.patched import CommandParams, command, tests_touched
from rl_core.environments.criteria.remote import RemoteParams, remote
from rl_core.environments.criteria.reported import ReportedParams, reported
from rl_core.environments.criteria.said import (
    ExactParams,
    FinalNumberParams,
    MaxLengthParams,
    NumberParams,
    RegexParams,
    exact,
    final_number_right,
    first_fact,
    matches,
    max_length,
    number,
    states_fact,
    tool_ran,
    tool_result_right,
)
from rl_core.environments.criteria.schema import SchemaParams, fits_schema
from rl_core.environments.criteria.signals import UserSignalParams, user_signal
from rl_core.environments.criteria.states import FinalStateParams, final_state
from rl_core.environments.criteria.unit_tests import UnitTestsParams, unit_tests

__all__ = [
    "CRITERIA",
    "WATCHED",
    "CriterionKind",
    "CriterionType",
    "Graded",
    "Outside",
    "Verdict",
    "defined_functions",
    "first_fact",
]


@dataclass(frozen=True)
class CriterionType:
    """A row of the table: the kind's parameters, and its grader."""

    params: type[Params]
    grade: Callable[[Graded, Any], Awaitable[Verdict]]


CRITERIA: dict[CriterionKind, CriterionType] = {
    CriterionKind.TOOL_RAN: CriterionType(NoParams, tool_ran),
    CriterionKind.TOOL_RESULT_RIGHT: CriterionType(NoParams, tool_result_right),
    CriterionKind.FINAL_NUMBER_RIGHT: CriterionType(FinalNumberParams, final_number_right),
    CriterionKind.NUMBER: CriterionType(NumberParams, number),
    CriterionKind.EXACT: CriterionType(ExactParams, exact),
    CriterionKind.REGEX: CriterionType(RegexParams, matches),
    CriterionKind.JSON_SCHEMA: CriterionType(SchemaParams, fits_schema),
    CriterionKind.MAX_LENGTH: CriterionType(MaxLengthParams, max_length),
    CriterionKind.STATES_FACT: CriterionType(NoParams, states_fact),
    CriterionKind.FINAL_STATE: CriterionType(FinalStateParams, final_state),
    CriterionKind.DEFINES_FUNCTION: CriterionType(NoParams, defines_function),
    CriterionKind.VISIBLE_TESTS: CriterionType(OracleParams, visible_tests),
    CriterionKind.HIDDEN_TESTS: CriterionType(HiddenTestsParams, hidden_tests),
    CriterionKind.TEST_GAP: CriterionType(OracleParams, test_gap),
    CriterionKind.IMPOSSIBLE_PASSED: CriterionType(OracleParams, impossible_passed),
    CriterionKind.TESTS_TOUCHED: CriterionType(NoParams, tests_touched),
    CriterionKind.COMMAND: CriterionType(CommandParams, command),
    CriterionKind.UNIT_TESTS: CriterionType(UnitTestsParams, unit_tests),
    CriterionKind.JUDGE: CriterionType(JudgeParams, judge),
    CriterionKind.REMOTE: CriterionType(RemoteParams, remote),
    CriterionKind.REPORTED: CriterionType(ReportedParams, reported),
    CriterionKind.USER_SIGNAL: CriterionType(UserSignalParams, user_signal),
}
