"""Rollout groups: admitted by the conductor, run and scored by workers, consumed, dropped or voided."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from controlplane.models import Evaluation, PolicyVersion, Project, Rollout, RolloutGroup, Run, Stage, Task
from controlplane.services.events import CONDUCTOR, Actor, event_append, project_topic, run_topic
from controlplane.services.transitions import sources_of, transition
from controlplane.services.work import work_cancel, work_enqueue_many
from controlplane.states import EventType, GroupPurpose, GroupState, WorkKind

TRIES_OF_A_DRAW = 3  # groups, after which a draw that was lost each time is let go
LOST = (GroupState.DROPPED, GroupState.VOIDED)
IN_FLIGHT = (GroupState.ADMITTED, GroupState.RUNNING, GroupState.SCORING)


@dataclass(frozen=True, slots=True)
class Draw:
    """A task at its place in a stage's curriculum."""

    number: int
    task: Task


def groups_admit(
    *, run: Run, stage: Stage, draws: Sequence[Draw], size: int, version: PolicyVersion, run_seed: int
) -> list[RolloutGroup]:
    """Admit one group for each draw at the stage's next positions, their rollouts and their work with them.

    All that is random in a group follows from its draw: one that is admitted again in a lost one's place is the same.
    """
    with transaction.atomic():
        first = stage.admitted_groups
        groups = [
            RolloutGroup(
                run=run,
                stage=stage,
                task=draw.task,
                purpose=GroupPurpose.TRAIN,
                position=first + offset,
                draw=draw.number,
                size=size,
                seed=_seed(run_seed, stage.position, draw.number),
                admitted_version=version,
            )
            for offset, draw in enumerate(draws)
        ]
        _create(groups, project_id=run.project_id, run=run)
        stage.admitted_groups = first + len(groups)
        stage.draws = max([stage.draws, *(draw.number + 1 for draw in draws)])
        stage.save(update_fields=["admitted_groups", "draws"])
        _announce(groups, project_id=run.project_id, run=run)
    return groups


def evaluation_groups_admit(*, evaluation: Evaluation, project: Project, tasks: Sequence[Task]) -> list[RolloutGroup]:
    """Admit the groups of an evaluation: one attempt at each task, of exactly its version."""
    with transaction.atomic():
        groups = [
            RolloutGroup(
                run=evaluation.run,
                evaluation=evaluation,
                task=task,
                purpose=GroupPurpose.EVALUATION,
                position=position,
                draw=position,
                size=1,
                seed=0,
                admitted_version_id=evaluation.version_id,
            )
            for position, task in enumerate(tasks)
        ]
        _create(groups, project_id=project.pk, run=evaluation.run)
        _announce(groups, project_id=project.pk, run=evaluation.run)
    return groups


def group_move(
    *, group: RolloutGroup, to: GroupState, actor: Actor = CONDUCTOR, reason: str = "", **changes: Any
) -> RolloutGroup:
    """Change a group's state, with its event. Raises: Conflict."""
    with transaction.atomic():
        transition(group, to=to, reason=reason[:500], **changes)
        _append(group, actor, reason)
    return group


def groups_discard(*, reasons: Mapping[uuid.UUID, str], to: GroupState) -> int:
    """Drop or void groups (id → why) that will not be used, and cancel what is still to be done for them.

    A group that moved meanwhile is left alone: the next look decides again. All rows are locked before the first event
    is appended, as everywhere: whoever holds a log waits for nobody. Returns how many were discarded.
    """
    if not reasons:
        return 0
    with transaction.atomic():
        for kind in (WorkKind.ROLLOUT, WorkKind.SCORE):
            work_cancel(kind=kind, refs=reasons)
        rows = RolloutGroup.objects.select_for_update(of=("self",)).select_related("run", "evaluation")
        discarded = list(rows.filter(pk__in=reasons, state__in=sources_of(to)).order_by("pk"))
        for group in discarded:
            transition(group, to=to, reason=reasons[group.pk][:500], finished_at=Now())
        for group in discarded:
            _append(group, CONDUCTOR, reasons[group.pk])
    return len(discarded)


def groups_drop_all(*, run: Run, reason: str) -> int:
    """Drop whatever of the run is not consumed yet; its work is already cancelled. Returns how many."""
    open_groups = RolloutGroup.objects.filter(run=run, state__in=sources_of(GroupState.DROPPED))
    return open_groups.update(state=GroupState.DROPPED, reason=reason[:500], finished_at=Now())


def _seed(run_seed: int, stage_position: int, draw: int) -> int:
    text = f"{run_seed}/{stage_position}/{draw}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _create(groups: list[RolloutGroup], *, project_id: uuid.UUID, run: Run | None) -> None:
    RolloutGroup.objects.bulk_create(groups)
    Rollout.objects.bulk_create(
        Rollout(group=group, attempt=attempt) for group in groups for attempt in range(group.size)
    )
    work_enqueue_many(
        kind=WorkKind.ROLLOUT, refs=[group.pk for group in groups], project_id=project_id, run=run, max_failures=5
    )


def _announce(groups: list[RolloutGroup], *, project_id: uuid.UUID, run: Run | None) -> None:
    if not groups:
        return
    event_append(
        project_id=project_id,
        topic=run_topic(run.pk) if run else project_topic(project_id),
        event_type=EventType.GROUP_CHANGED,
        actor=CONDUCTOR,
        data={
            "state": GroupState.ADMITTED.value,
            "purpose": groups[0].purpose,
            "groups": [str(group.pk) for group in groups],
            "positions": [group.position for group in groups],
        },
    )


def _append(group: RolloutGroup, actor: Actor, reason: str) -> None:
    project_id = group.run.project_id if group.run else _evaluation_project(group)
    event_append(
        project_id=project_id,
        topic=run_topic(group.run_id) if group.run_id else project_topic(project_id),
        event_type=EventType.GROUP_CHANGED,
        actor=actor,
        reason=reason,
        data={
            "state": group.state,
            "purpose": group.purpose,
            "group": str(group.pk),
            "position": group.position,
            "mean_reward": group.mean_reward,
        },
    )


def _evaluation_project(group: RolloutGroup) -> uuid.UUID:
    if group.evaluation is None:
        raise RuntimeError(f"group {group.pk} belongs to neither a run nor an evaluation")
    return group.evaluation.project_id
