"""Kinds of rubric criteria: deterministic graders of a finished trajectory, in one table.

A criterion's value is in [0, 1]. A grader that cannot do its work raises; it never answers with a score. Text that a
policy wrote is data here: it is parsed and matched, never run, except inside a sandbox by the oracle.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

import msgspec
import regex

from rl_core.environments.calculator import CalculatorError, calculate, format_number
from rl_core.environments.oracle import Case, judge_cases
from rl_core.environments.tasks import Task
from rl_core.errors import EnvironmentFault, SandboxRefused, TaskSetError
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Role, Trajectory

_MAX_MATCHED_CHARS = 20_000
_MATCH_S = 1.0
_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"


class CriterionKind(StrEnum):
    """What a criterion looks at."""

    TOOL_RAN = "tool_ran"  # a call of the tool succeeded
    TOOL_RESULT_RIGHT = "tool_result_right"  # the last successful call's result is the reference number
    FINAL_NUMBER_RIGHT = "final_number_right"  # the last turn states the reference number
    DEFINES_FUNCTION = "defines_function"  # the exported candidate defines the function asked for
    VISIBLE_TESTS = "visible_tests"  # the candidate passed the test the policy could see
    HIDDEN_TESTS = "hidden_tests"  # it passes the tests the policy could not see, too
    EXACT = "exact"  # the last turn is a given text
    REGEX = "regex"  # the last turn matches a pattern
    MAX_LENGTH = "max_length"  # the last turn is short enough
    STATES_FACT = "states_fact"  # the last turn has one of the reference's key words


class Verdict(msgspec.Struct, frozen=True):
    """A criterion's value in [0, 1] and why."""

    value: float
    reason: str


@dataclass(frozen=True)
class Graded:
    """What a criterion may look at."""

    task: Task
    trajectory: Trajectory
    sandbox: Sandbox | None

    @property
    def last_turn(self) -> str:
        """The last thing the policy said."""
        turns = [m.content for m in self.trajectory.messages if m.role is Role.ASSISTANT and m.segment >= 0]
        return turns[-1] if turns else ""

    def reference(self, key: str) -> Any:
        """A value of the task's reference. Raises: TaskSetError when the task has none."""
        try:
            return self.task.reference[key]
        except KeyError:
            raise TaskSetError(f"task {self.task.id} has no reference {key!r}, which its rubric needs") from None


class _Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parameters: unknown keys are refused."""


class NoParams(_Params, frozen=True):
    """A kind without parameters."""


class FinalNumberParams(_Params, frozen=True):
    """`label` comes before the number. `after_tool`: only a turn that follows a tool result counts."""

    label: str = "Answer:"
    after_tool: bool = True


class HiddenTestsParams(_Params, frozen=True):
    """`later` is the value of a solution that needed more than one call."""

    later: float = 1.0


class ExactParams(_Params, frozen=True):
    """The text, compared without surrounding white space."""

    text: str


class RegexParams(_Params, frozen=True):
    """A pattern that must be found, or with `absent` must not be."""

    pattern: str
    absent: bool = False


class MaxLengthParams(_Params, frozen=True):
    """The most words the last turn may have, and the fewest."""

    words: int
    at_least: int = 0


async def _tool_ran(graded: Graded, _: NoParams) -> Verdict:
    ran = any(call.ok for call in graded.trajectory.tool_calls)
    return Verdict(float(ran), "a call ran" if ran else "no call ran")


async def _tool_result_right(graded: Graded, _: NoParams) -> Verdict:
    expected = _number(str(graded.reference("answer")))
    results = [call.result for call in graded.trajectory.tool_calls if call.ok]
    right = bool(results) and _number(results[-1]) == expected
    return Verdict(float(right), f"last result {results[-1][:40] if results else 'none'}")


async def _final_number_right(graded: Graded, params: FinalNumberParams) -> Verdict:
    if params.after_tool and not any(m.role is Role.TOOL and m.segment >= 0 for m in graded.trajectory.messages):
        return Verdict(0.0, "no turn after a tool result")
    pattern = re.escape(params.label) + r"[ \t]*" + _NUMBER
    stated = {_number(text) for text in re.findall(pattern, graded.last_turn[:_MAX_MATCHED_CHARS])}
    if len(stated) != 1:
        return Verdict(0.0, f"{len(stated)} different numbers stated" if stated else "no number stated")
    number = stated.pop()
    right = number is not None and number == _number(str(graded.reference("answer")))
    return Verdict(float(right), f"stated {format_number(number) if number is not None else 'no number'}")


async def _defines_function(graded: Graded, _: NoParams) -> Verdict:
    name = str(graded.reference("function"))
    defined = name in defined_functions(graded.trajectory.artifacts.get("candidate", ""))
    return Verdict(float(defined), f"{name} is {'' if defined else 'not '}defined")


async def _visible_tests(graded: Graded, _: NoParams) -> Verdict:
    calls = graded.trajectory.tool_calls
    passed = bool(calls) and calls[-1].ok
    return Verdict(float(passed), "the visible test passed" if passed else "the visible test did not pass")


async def _hidden_tests(graded: Graded, params: HiddenTestsParams) -> Verdict:
    calls = graded.trajectory.tool_calls
    if not calls or not calls[-1].ok:
        return Verdict(0.0, "the visible test did not pass")
    if graded.sandbox is None:
        raise SandboxRefused("hidden tests run model-written code and need sandboxd; start it with `manage.py up`")
    cases = [Case(tuple(case["args"]), case["result"]) for case in graded.reference("hidden")]
    report = await judge_cases(
        graded.sandbox,
        code=graded.trajectory.artifacts.get("candidate", ""),
        function=str(graded.reference("function")),
        cases=cases,
    )
    if not report.passed:
        return Verdict(0.0, f"hidden tests: {report.first_failure}")
    return Verdict(1.0 if len(calls) == 1 else params.later, f"all hidden tests passed at call {len(calls)}")


async def _exact(graded: Graded, params: ExactParams) -> Verdict:
    same = graded.last_turn.strip() == params.text.strip()
    return Verdict(float(same), "the text is equal" if same else "the text differs")


async def _regex(graded: Graded, params: RegexParams) -> Verdict:
    try:
        found = regex.search(params.pattern, graded.last_turn[:_MAX_MATCHED_CHARS], timeout=_MATCH_S) is not None
    except TimeoutError as error:
        raise EnvironmentFault(f"the pattern took longer than {_MATCH_S:g} s on a text; make it simpler") from error
    return Verdict(float(found != params.absent), "found" if found else "not found")


async def _max_length(graded: Graded, params: MaxLengthParams) -> Verdict:
    words = len(graded.last_turn.split())
    wanted = f"{params.at_least} to {params.words}" if params.at_least else f"at most {params.words}"
    return Verdict(float(params.at_least <= words <= params.words), f"{words} words, {wanted}")


async def _states_fact(graded: Graded, _: NoParams) -> Verdict:
    found = first_fact(graded.last_turn, graded.reference("fact"))
    return Verdict(float(bool(found)), f"says {found}" if found else "has none of the key words")


@dataclass(frozen=True)
class CriterionType:
    """A row of the table: the kind's parameters, and its grader."""

    params: type[_Params]
    grade: Callable[[Graded, Any], Awaitable[Verdict]]


CRITERIA: dict[CriterionKind, CriterionType] = {
    CriterionKind.TOOL_RAN: CriterionType(NoParams, _tool_ran),
    CriterionKind.TOOL_RESULT_RIGHT: CriterionType(NoParams, _tool_result_right),
    CriterionKind.FINAL_NUMBER_RIGHT: CriterionType(FinalNumberParams, _final_number_right),
    CriterionKind.DEFINES_FUNCTION: CriterionType(NoParams, _defines_function),
    CriterionKind.VISIBLE_TESTS: CriterionType(NoParams, _visible_tests),
    CriterionKind.HIDDEN_TESTS: CriterionType(HiddenTestsParams, _hidden_tests),
    CriterionKind.EXACT: CriterionType(ExactParams, _exact),
    CriterionKind.REGEX: CriterionType(RegexParams, _regex),
    CriterionKind.MAX_LENGTH: CriterionType(MaxLengthParams, _max_length),
    CriterionKind.STATES_FACT: CriterionType(NoParams, _states_fact),
}


def defined_functions(code: str) -> set[str]:
    """Names that a module defines as functions at its top level; none when it does not parse."""
    if len(code) > _MAX_MATCHED_CHARS:
        return set()
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def first_fact(text: str, words: Sequence[str]) -> str:
    """The first of the key words that the text has, or nothing. A word with a star at its end is a stem."""
    for word in words:
        pattern = re.escape(word.removesuffix("*")) + (r"\w*" if word.endswith("*") else "")
        if re.search(rf"(?i)(?<!\w){pattern}(?!\w)", text[:_MAX_MATCHED_CHARS]):
            return word
    return ""


def _number(text: str) -> Fraction | None:
    """A number as the calculator reads it, thousands' commas aside."""
    try:
        return calculate(text.replace(",", ""))
    except CalculatorError:
        return None


def grading_failed(error: EnvironmentFault) -> str:
    """One line for a score whose grader failed."""
    return f"{error.code}: {error}"
