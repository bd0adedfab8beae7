"""Rubrics: weighted criteria, graded one by one, combined into a reward.

A rubric is immutable and named by the hash of its content; every score names that hash. A grader's failure is an
error of its criterion, never a score, and a reward is refused while any criterion failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import msgspec
from blake3 import blake3

from rl_core.environments.criteria import CRITERIA, WATCHED, CriterionKind, Graded, Outside
from rl_core.environments.tasks import Task
from rl_core.errors import EnvironmentFault, SpecError
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Trajectory

_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class Tier(StrEnum):
    """How much a criterion matters to its author."""

    ESSENTIAL = "essential"
    IMPORTANT = "important"
    OPTIONAL = "optional"
    PITFALL = "pitfall"


class Criterion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of a rubric. A weight of 0 watches without rewarding."""

    key: str
    text: str
    kind: CriterionKind
    weight: float
    tier: Tier = Tier.IMPORTANT
    params: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise SpecError(f"criterion key {self.key[:40]!r} must be lower-case letters, digits and _")
        if not 0 <= self.weight <= 1000:
            raise SpecError(f"criterion {self.key}: weight must be in [0, 1000], not {self.weight}")
        if self.weight and self.kind in WATCHED:
            raise SpecError(f"criterion {self.key}: {self.kind} is watched, never rewarded; give it the weight 0")
        try:
            msgspec.convert(self.params, CRITERIA[self.kind].params)
        except (msgspec.ValidationError, SpecError) as error:
            raise SpecError(f"criterion {self.key}: {error}") from error


class Rubric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ordered set of criteria."""

    slug: str
    criteria: tuple[Criterion, ...]

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.slug):
            raise SpecError(f"rubric slug {self.slug[:40]!r} must be lower-case letters, digits and -")
        keys = [criterion.key for criterion in self.criteria]
        if len(set(keys)) != len(keys):
            raise SpecError("two criteria of the rubric have the same key")
        if sum(criterion.weight for criterion in self.criteria) <= 0:
            raise SpecError("the rubric rewards nothing: give at least one criterion a positive weight")

    def to_json(self) -> bytes:
        """Canonical JSON: equal rubrics give equal bytes."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def content_hash(self) -> str:
        """blake3 of the canonical form: the name that scores refer to."""
        return blake3(self.to_json()).hexdigest()


class CriterionScore(msgspec.Struct, frozen=True, kw_only=True):
    """One criterion's outcome: a value in [0, 1] with its reason, or the error of its grader.

    `retryable` says of an error whether grading again may help.
    """

    key: str
    value: float | None
    reason: str
    error: str | None = None
    retryable: bool = True


def parse_rubric(data: dict[str, Any] | bytes) -> Rubric:
    """Validate a rubric given as a mapping or as JSON bytes. Raises: SpecError, naming the key."""
    try:
        return msgspec.json.decode(data, type=Rubric) if isinstance(data, bytes) else msgspec.convert(data, Rubric)
    except msgspec.DecodeError as error:
        raise SpecError(f"the rubric is not valid: {error}") from error


async def grade(
    rubric: Rubric,
    *,
    task: Task,
    trajectory: Trajectory,
    sandbox: Sandbox | None,
    outside: Outside | None = None,
    signals: Mapping[str, float] | None = None,
) -> list[CriterionScore]:
    """Score every criterion of a finished trajectory. A failed grader is reported in its score's `error`.

    Without `outside`, judges and remote graders are not asked: their criteria fail.
    """
    graded = Graded(task, trajectory, sandbox, outside, signals or {})
    return [await _score(criterion, replace(graded, asked=criterion.text)) for criterion in rubric.criteria]


async def _score(criterion: Criterion, graded: Graded) -> CriterionScore:
    row = CRITERIA[criterion.kind]
    try:
        verdict = await row.grade(graded, msgspec.convert(criterion.params, row.params))
    except EnvironmentFault as error:
        return CriterionScore(
            key=criterion.key, value=None, reason="", error=f"{error.code}: {error}", retryable=error.retryable
        )
    return CriterionScore(key=criterion.key, value=verdict.value, reason=verdict.reason.replace("\0", "\ufffd"))


def combine(rubric: Rubric, scores: list[CriterionScore]) -> float:
    """The reward: the weighted mean of all criteria, in [0, 1].

    Raises: EnvironmentFault when a criterion failed or is missing: grade again, never guess.
    """
    by_key = {score.key: score for score in scores}
    total = 0.0
    for criterion in rubric.criteria:
        score = by_key.get(criterion.key)
        if score is None or score.value is None:
            why = score.error if score else "it was not graded"
            raise EnvironmentFault(f"criterion {criterion.key} has no score ({why}); grade the trajectory again")
        total += criterion.weight * score.value
    return total / sum(criterion.weight for criterion in rubric.criteria)
