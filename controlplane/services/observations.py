"""What scored rollouts show: tallies of tasks by policy version, and how each behaved; counted with the reward."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from django.db.models import F

from controlplane.models import Rollout, RolloutGroup, RolloutWatch, TaskTally
from rl_core.environments.criteria.kinds import CriterionKind
from rl_core.environments.watch import Signs

FULL_REWARD = 1.0 - 1e-6


def rollout_note(
    *, group: RolloutGroup, rollout: Rollout, values: Mapping[str, float | None], signs: Signs | None
) -> None:
    """Count a rollout that has its reward now, in the caller's transaction. `values` are its criteria's, by kind.

    The version it counts for is the newest that it used.
    """
    if rollout.newest_version_id is not None and rollout.reward is not None:
        _tally(group, rollout.newest_version_id, rollout.reward)
    if signs is None:
        return
    impossible = values.get(CriterionKind.IMPOSSIBLE_PASSED)
    RolloutWatch.objects.create(
        rollout=rollout,
        environment=group.task.task_set.environment,
        version_id=rollout.newest_version_id,
        tokens=signs.tokens,
        tool_calls=signs.tool_calls,
        tool_errors=signs.tool_errors,
        no_edit=signs.no_edit,
        refusal=signs.refusal,
        gap=_gap(values),
        impossible_passed=bool(impossible)
        if group.task.reference.get("impossible") and impossible is not None
        else None,
        tests_touched=signs.tests_touched or bool(values.get(CriterionKind.TESTS_TOUCHED)),
        special_cased=signs.special_cased,
        early_exit=signs.early_exit,
        tampering=signs.tampering,
        turns=signs.turns,
    )


def _gap(values: Mapping[str, float | None]) -> float | None:
    """The watched criterion's, else visible tests passed where hidden ones did not."""
    watched = values.get(CriterionKind.TEST_GAP)
    if watched is not None:
        return watched
    visible, hidden = values.get(CriterionKind.VISIBLE_TESTS), values.get(CriterionKind.HIDDEN_TESTS)
    return max(0.0, visible - float(hidden > 0)) if visible is not None and hidden is not None else None


def _tally(group: RolloutGroup, version_id: UUID, reward: float) -> None:
    row, _ = TaskTally.objects.get_or_create(task=group.task, version_id=version_id)
    TaskTally.objects.filter(pk=row.pk).update(
        attempts=F("attempts") + 1,
        passes=F("passes") + int(reward >= FULL_REWARD),
        rewards=F("rewards") + reward,
        squares=F("squares") + reward * reward,
    )
