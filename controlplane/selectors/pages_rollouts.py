"""Reads for the pages: rollouts. Every one is listed; none is only a sample."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.db.models import Q

from controlplane.models import CriterionScore, Project, Rollout

PAGE = 50


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """What the rollouts page was asked for. Empty means all; `order` is newest, best or worst."""

    run: UUID | None = None
    step: int | None = None
    split: str = ""
    state: str = ""
    task: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    order: str = "newest"
    after: str = ""


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """Rollouts in the order asked for, and where the next page begins (empty: there is none)."""

    rollouts: list[Rollout]
    next: str


def rollouts_page(project: Project, wanted: RolloutFilter, size: int = PAGE) -> RolloutPage:
    """One page of a project's rollouts, by key: its cost does not grow with its depth."""
    rows = (
        Rollout.objects.filter(_query(project, wanted))
        .select_related(
            "group__task", "group__run", "group__step", "group__evaluation", "oldest_version", "newest_version"
        )
        .defer("group__task__input", "group__task__reference", "group__run__spec")
    )
    descending = wanted.order != "worst"
    if wanted.order in ("best", "worst"):
        rows = rows.filter(reward__isnull=False).filter(_beyond_reward(wanted.after, descending))
        rows = rows.order_by("-reward", "-pk") if descending else rows.order_by("reward", "pk")
    else:
        after = _uuid(wanted.after)
        rows = (rows.filter(pk__lt=after) if after else rows).order_by("-pk")
    found = list(rows[: size + 1])
    return RolloutPage(found[:size], _cursor(found[size - 1], wanted.order) if len(found) > size else "")


def _query(project: Project, wanted: RolloutFilter) -> Q:
    query = Q(group__task__task_set__project=project)
    exact = {
        "group__run_id": wanted.run,
        "group__step__number": wanted.step,
        "group__task__split": wanted.split,
        "state": wanted.state,
    }
    query &= Q(**{name: value for name, value in exact.items() if value not in (None, "")})
    if wanted.task:
        query &= Q(group__task__key__icontains=wanted.task)
    if wanted.reward_from is not None:
        query &= Q(reward__gte=wanted.reward_from)
    if wanted.reward_to is not None:
        query &= Q(reward__lte=wanted.reward_to)
    return query


def _cursor(rollout: Rollout, order: str) -> str:
    return f"{rollout.reward!r}_{rollout.pk}" if order in ("best", "worst") else str(rollout.pk)


def _beyond_reward(after: str, descending: bool) -> Q:
    """What comes after a cursor; everything for one that does not parse."""
    value, _, key = after.partition("_")
    pk = _uuid(key)
    try:
        reward = float(value)
    except ValueError:
        return Q()
    if pk is None:
        return Q()
    if descending:
        return Q(reward__lt=reward) | Q(reward=reward, pk__lt=pk)
    return Q(reward__gt=reward) | Q(reward=reward, pk__gt=pk)


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def rollout_with_context(rollout_id: UUID) -> Rollout | None:
    """A rollout with everything that its page names."""
    return (
        Rollout.objects.filter(pk=rollout_id)
        .select_related(
            "group__task__task_set__project",
            "group__run__lineage__model",
            "group__evaluation__version__lineage__model",
            "group__step",
            "group__admitted_version__lineage__model",
            "replica__cluster",
            "oldest_version",
            "newest_version",
        )
        .first()
    )


def scores_of(rollout: Rollout) -> list[CriterionScore]:
    """All scores of a rollout, by rubric version, then in the order they were written."""
    return list(
        CriterionScore.objects.filter(rollout=rollout)
        .select_related("rubric_version__rubric")
        .order_by("rubric_version__number", "pk")
    )


def siblings_of(rollout: Rollout) -> list[Rollout]:
    """All attempts at the same task in the same group."""
    return list(rollout.group.rollouts.order_by("attempt"))
