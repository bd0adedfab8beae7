"""Criteria of what the policy said, and of what its tools answered: parsed and matched as data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

import regex

from rl_core.environments.calculator import CalculatorError, calculate, format_number
from rl_core.environments.criteria.graded import MAX_MATCHED_CHARS, Graded, NoParams, Params, Verdict
from rl_core.environments.patterns import compile_pattern
from rl_core.errors import EnvironmentFault, SpecError
from rl_core.types import Role

MATCH_S = 1.0
_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
_FLOAT = re.compile(r"(?<![\w.])[-+−]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?(?!\w)", re.ASCII)


class FinalNumberParams(Params, frozen=True):
    """`label` comes before the number. `after_tool`: only a turn that follows a tool result counts."""

    label: str = "Answer:"
    after_tool: bool = True


class NumberParams(Params, frozen=True):
    """The number to state: `value`, or the reference's `answer` without one. Either tolerance is enough.

    With a `label` only numbers after it count, else all of the last turn; they must be one number.
    """

    value: float | None = None
    absolute: float = 0.0
    relative: float = 0.0
    label: str = ""

    def __post_init__(self) -> None:
        if not all(math.isfinite(n) for n in (self.value or 0.0, self.absolute, self.relative)):
            raise SpecError("value and tolerances must be finite")
        if self.absolute < 0 or self.relative < 0:
            raise SpecError("tolerances must not be negative")


class ExactParams(Params, frozen=True):
    """The text, compared without surrounding white space. `artifact` names an artefact to compare instead."""

    text: str
    artifact: str = ""


class RegexParams(Params, frozen=True):
    """A pattern that must be found, or with `absent` must not be."""

    pattern: str
    absent: bool = False

    def __post_init__(self) -> None:
        """Refuse what does not compile or plainly backtracks without bound; a match has a time limit besides."""
        compile_pattern(self.pattern)
        if re.search(r"[*+}]\)+[*+{]", self.pattern):
            raise SpecError("the pattern nests repetitions")


class MaxLengthParams(Params, frozen=True):
    """The most words the last turn may have, and the fewest."""

    words: int
    at_least: int = 0


async def tool_ran(graded: Graded, _: NoParams) -> Verdict:
    """1 when a call succeeded."""
    ran = any(call.ok for call in graded.trajectory.tool_calls)
    return Verdict(float(ran), "a call ran" if ran else "no call ran")


async def tool_result_right(graded: Graded, _: NoParams) -> Verdict:
    """1 when the last successful call's result is the reference number."""
    expected = _number(str(graded.reference("answer")))
    results = [call.result for call in graded.trajectory.tool_calls if call.ok]
    right = bool(results) and _number(results[-1]) == expected
    return Verdict(float(right), f"last result {results[-1][:40] if results else 'none'}")


async def final_number_right(graded: Graded, params: FinalNumberParams) -> Verdict:
    """1 when the last turn states the reference number, and no other, after the label."""
    if params.after_tool and not any(m.role is Role.TOOL and m.segment >= 0 for m in graded.trajectory.messages):
        return Verdict(0.0, "no turn after a tool result")
    pattern = re.escape(params.label) + r"[ \t]*" + _NUMBER
    stated = {_number(text) for text in re.findall(pattern, graded.last_turn[:MAX_MATCHED_CHARS])}
    if len(stated) != 1:
        return Verdict(0.0, f"{len(stated)} different numbers stated" if stated else "no number stated")
    number = stated.pop()
    right = number is not None and number == _number(str(graded.reference("answer")))
    return Verdict(float(right), f"stated {format_number(number) if number is not None else 'no number'}")


async def number(graded: Graded, params: NumberParams) -> Verdict:
    """1 when the last turn states one number, and that is within the tolerance."""
    expected = params.value if params.value is not None else _float(str(graded.reference("answer")))
    if expected is None or not math.isfinite(expected):
        raise EnvironmentFault(f"the reference answer of task {graded.task.id} is no number")
    text = graded.last_turn[:MAX_MATCHED_CHARS]
    if params.label:
        _, found, text = text.partition(params.label)
        text = text if found else ""
    stated = {_float(match) for match in _FLOAT.findall(text)}
    if len(stated) != 1:
        return Verdict(0.0, f"{len(stated)} different numbers stated" if stated else "no number stated")
    value = stated.pop()
    close = value is not None and abs(value - expected) <= max(params.absolute, params.relative * abs(expected))
    return Verdict(float(close), f"stated {value:g}" if value is not None else "stated no number")


async def exact(graded: Graded, params: ExactParams) -> Verdict:
    """1 when the texts are equal."""
    same = graded.text(params.artifact).strip() == params.text.strip()
    return Verdict(float(same), "the text is equal" if same else "the text differs")


async def matches(graded: Graded, params: RegexParams) -> Verdict:
    """1 when the pattern is found, or with `absent` is not. Raises: EnvironmentFault for one that takes too long."""
    try:
        found = regex.search(params.pattern, graded.last_turn[:MAX_MATCHED_CHARS], timeout=MATCH_S) is not None
    except TimeoutError as error:
        raise EnvironmentFault(f"the pattern took longer than {MATCH_S:g} s on a text; make it simpler") from error
    return Verdict(float(found != params.absent), "found" if found else "not found")


async def max_length(graded: Graded, params: MaxLengthParams) -> Verdict:
    """1 when the last turn has as many words as wanted."""
    words = len(graded.last_turn.split())
    wanted = f"{params.at_least} to {params.words}" if params.at_least else f"at most {params.words}"
    return Verdict(float(params.at_least <= words <= params.words), f"{words} words, {wanted}")


async def states_fact(graded: Graded, _: NoParams) -> Verdict:
    """1 when the last turn has one of the reference's key words."""
    found = first_fact(graded.last_turn, graded.reference("fact"))
    return Verdict(float(bool(found)), f"says {found}" if found else "has none of the key words")


def first_fact(text: str, words: Sequence[str]) -> str:
    """The first of the key words that the text has, or nothing. A word with a star at its end is a stem."""
    for word in words:
        pattern = re.escape(word.removesuffix("*")) + (r"\w*" if word.endswith("*") else "")
        if re.search(rf"(?i)(?<!\w){pattern}(?!\w)", text[:MAX_MATCHED_CHARS]):
            return word
    return ""


def _number(text: str) -> Fraction | None:
    """A number as the calculator reads it, thousands' commas aside."""
    try:
        return calculate(text.replace(",", ""))
    except CalculatorError:
        return None


def _float(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("−", "-"))
    except ValueError:
        return None
