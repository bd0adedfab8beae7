"""What a criterion can look at: the kinds, by the names that rubrics use."""

from __future__ import annotations

from enum import StrEnum


class CriterionKind(StrEnum):
    """What a criterion looks at."""

    TOOL_RAN = "tool_ran"  # a call of the tool succeeded
    TOOL_RESULT_RIGHT = "tool_result_right"  # the last successful call's result is the reference number
    FINAL_NUMBER_RIGHT = "final_number_right"  # the last turn states the reference number
    NUMBER = "number"  # the last turn states a number within a tolerance
    EXACT = "exact"  # the last turn, or an artefact, is a given text
    REGEX = "regex"  # the last turn matches a pattern
    JSON_SCHEMA = "json_schema"  # the last turn, or an artefact, is JSON that fits a schema
    MAX_LENGTH = "max_length"  # the last turn is short enough
    STATES_FACT = "states_fact"  # the last turn has one of the reference's key words
    FINAL_STATE = "final_state"  # the state in which the world was left is the reference's
    DEFINES_FUNCTION = "defines_function"  # the exported candidate defines the function asked for
    VISIBLE_TESTS = "visible_tests"  # an oracle's share of the tests that the policy could see
    HIDDEN_TESTS = "hidden_tests"  # an oracle's: all tests pass, those the policy could not see, too
    TEST_GAP = "test_gap"  # watched: the visible tests' share less the hidden tests'
    IMPOSSIBLE_PASSED = "impossible_passed"  # watched: a task that cannot be solved passes
    TESTS_TOUCHED = "tests_touched"  # watched: the patch changes tests, or what runs them
    COMMAND = "command"  # a command over the exported patch ends with 0
    UNIT_TESTS = "unit_tests"  # exactly the tests of the reference pass over the exported patch
    JUDGE = "judge"  # a language model's score
    REMOTE = "remote"  # a grader over HTTP
    REPORTED = "reported"  # a score that a remote environment gave
    USER_SIGNAL = "user_signal"  # what a user's signal said


# Watched, never rewarded: to pay for these is to pay for cheating.
WATCHED = frozenset({CriterionKind.TEST_GAP, CriterionKind.IMPOSSIBLE_PASSED, CriterionKind.TESTS_TOUCHED})
