"""Simulated tasks rolled out beside a window: admitted once its answers suffice, mixed into its batch when ready."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from controlplane.conductor.context import StageContext
from controlplane.conductor.curriculum import next_draws
from controlplane.conductor.rl import hopeless
from controlplane.errors import NotFound
from controlplane.models import RolloutGroup, RubricVersion
from controlplane.selectors.task_sets import task_set_named
from controlplane.services.groups import LOST, groups_admit
from controlplane.services.runs import run_note
from controlplane.states import GroupState
from rl_core.specs import ReplaySpec


def replay_pinned(context: StageContext, spec: ReplaySpec) -> dict[str, Any]:
    """What the stage pins when it starts: the newest task set and rubric. Raises: NotFound."""
    if not spec.share:
        return {}
    project = context.run.project
    task_set = task_set_named(project, spec.task_set)
    rubric = RubricVersion.objects.filter(rubric__project=project, rubric__slug=spec.rubric).order_by("-number").first()
    if task_set is None or rubric is None:
        what = f"task set {spec.task_set!r}" if task_set is None else f"rubric {spec.rubric!r}"
        raise NotFound(f"{what} is gone; create it again and resume")
    return {"task_set": task_set, "rubric_version": rubric}


def replay_asked_at(context: StageContext) -> datetime | None:
    """When the stage admitted its first group: what users say later is for the next window. None before."""
    first = context.stage.groups.order_by("created_at").first()
    return first.created_at if first else None


def replay_groups(context: StageContext, spec: ReplaySpec, *, attempts: int) -> list[RolloutGroup] | None:
    """Ready groups enough for a batch of `attempts` others; None while they are rolled out, which is admitted here."""
    wanted = spec.groups(attempts)
    if not wanted:
        return []
    if hopeless(context):
        return None
    missing = wanted - context.stage.groups.exclude(state__in=LOST).count()
    if missing > 0:
        groups_admit(
            run=context.run,
            stage=context.stage,
            draws=next_draws(context, missing, prompts_per_step=wanted),
            size=spec.group_size,
            version=context.head,
            run_seed=context.spec.seed,
        )
    ready = context.stage.groups.filter(state=GroupState.READY).select_related("run").order_by("draw")
    groups = list(ready[:wanted])
    if len(groups) < wanted:
        run_note(run=context.run, reason=f"waits for replay: {len(groups)} of {wanted} groups")
        return None
    return groups
