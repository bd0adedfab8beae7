"""One look at one run. Safe to call at any time, any number of times, by any number of processes."""

from __future__ import annotations

import uuid

import structlog
from django.db import transaction
from django.db.models.functions import Now

from controlplane.conductor.context import StageContext
from controlplane.conductor.placement import retarget_one
from controlplane.conductor.stages import STAGES
from controlplane.models import Evaluation, Run, WorkUnit
from controlplane.selectors.run_clusters import rollout_clusters, run_holding_clusters_of, spec_of
from controlplane.services.evaluations import evaluation_advance
from controlplane.services.events import CONDUCTOR
from controlplane.services.groups import groups_discard
from controlplane.services.locks import clusters_try_lock, run_try_lock
from controlplane.services.runs import run_fail, run_move, run_note
from controlplane.states import EvaluationState, GroupPurpose, GroupState, RunState, StageState, WorkKind, WorkState
from rl_core.types import StageKind

log = structlog.get_logger(__name__)

ACTIVE = [RunState.PENDING, RunState.RUNNING, RunState.PAUSED]
_MAX_RETARGETS = 64


def run_advance(run_id: uuid.UUID) -> bool:
    """Do what is next for a run; False when somebody else is at it just now.

    The advisory lock lives as long as each transaction and is tried, not waited for: nothing is ever stuck behind a
    conductor that died.
    """
    for evaluation_id in _evaluations_to_look_at(run_id):
        evaluation_advance(evaluation_id)
    with transaction.atomic():
        if not run_try_lock(run_id):
            return False
        run = _read(run_id)
        if run is None:
            return True
        _advance(run)
    for _ in range(_MAX_RETARGETS):
        with transaction.atomic():
            if not run_try_lock(run_id):
                return False
            context = _context(run_id)
            if context is None or not retarget_one(context):
                return True
    return True


def runs_active() -> list[uuid.UUID]:
    """Runs that are to be looked at."""
    return list(Run.objects.filter(state__in=ACTIVE).order_by("created_at").values_list("pk", flat=True))


def _read(run_id: uuid.UUID) -> Run | None:
    runs = Run.objects.select_related("project", "lineage__head")
    return runs.filter(pk=run_id, state__in=ACTIVE).first()


def _advance(run: Run) -> None:
    if run.state == RunState.PENDING and not _start(run):
        return
    if _fail_if_stuck(run):
        return
    _void_dead_groups(run)
    context = _stage_context(run)
    if context is None:
        _complete(run)
        return
    logic = STAGES[StageKind(context.stage.kind)]
    if context.stage.state == StageState.PENDING:
        if run.state != RunState.RUNNING:
            return
        logic.start(context)
        if context.stage.state != StageState.RUNNING:
            return
    logic.advance(context)
    if context.stage.state == StageState.COMPLETED:
        _complete(run)


def _start(run: Run) -> bool:
    """Start a run once the clusters it rolls out on are free."""
    if not clusters_try_lock(run.project_id):
        return False
    other = run_holding_clusters_of(run)
    if other is not None:
        run_note(run=run, reason=f"waits for run {other.name!r}, which uses the same clusters")
        return False
    run_move(run=run, to=RunState.RUNNING, actor=CONDUCTOR, reason="", started_at=Now())
    return True


def _stage_context(run: Run) -> StageContext | None:
    """The first stage that is not completed, or None when all are."""
    stages = run.stages.exclude(state=StageState.COMPLETED).select_related("task_set", "rubric_version")
    stage = stages.order_by("position").first()
    if stage is None:
        return None
    if run.lineage.head is None:
        raise RuntimeError(f"lineage {run.lineage_id} has no head")
    stage.run = run
    spec = spec_of(run)
    return StageContext(run, stage, spec, run.lineage.head, rollout_clusters(run, spec))


def _context(run_id: uuid.UUID) -> StageContext | None:
    run = _read(run_id)
    if run is None or run.state == RunState.PENDING:
        return None
    context = _stage_context(run)
    return context if context is not None and context.stage.state == StageState.RUNNING else None


def _fail_if_stuck(run: Run) -> bool:
    """A dead training step or evaluation, or a head that was found bad, needs a person."""
    head = run.lineage.head
    unit = WorkUnit.objects.filter(run=run, kind=WorkKind.TRAIN, state=WorkState.DEAD).first()
    if unit is not None:
        reason = f"training died after {unit.failures} failures: {unit.error}"
    elif Evaluation.objects.filter(run=run, state=EvaluationState.FAILED).exists():
        reason = "an evaluation failed; see its dead letters"
    elif head is not None and head.quarantined_at is not None:
        reason = f"version {head.ref} was found bad: no replica may hold it. Fork the run from a version before it"
    else:
        return False
    run_fail(run=run, actor=CONDUCTOR, reason=reason[:500])
    return True


def _void_dead_groups(run: Run) -> None:
    """Groups for training whose work is dead are void as a whole; others are admitted in their place."""
    dead = WorkUnit.objects.filter(run=run, kind__in=[WorkKind.ROLLOUT, WorkKind.SCORE], state=WorkState.DEAD)
    open_states = [GroupState.ADMITTED, GroupState.RUNNING, GroupState.SCORING]
    groups = run.groups.filter(pk__in=dead.values("ref"), purpose=GroupPurpose.TRAIN, state__in=open_states)
    wanted = set(groups.values_list("pk", flat=True))
    if wanted:
        reasons = {unit.ref: f"{unit.kind} died: {unit.error}" for unit in dead.filter(ref__in=wanted)}
        groups_discard(reasons=reasons, to=GroupState.VOIDED)


def _complete(run: Run) -> None:
    if run.state == RunState.RUNNING and not run.stages.exclude(state=StageState.COMPLETED).exists():
        run_move(run=run, to=RunState.COMPLETED, actor=CONDUCTOR, reason="", finished_at=Now())


def _evaluations_to_look_at(run_id: uuid.UUID) -> list[uuid.UUID]:
    states = [EvaluationState.PENDING, EvaluationState.RUNNING, EvaluationState.FAILED]
    rows = Evaluation.objects.filter(run_id=run_id, state__in=states)
    return list(rows.order_by("created_at").values_list("pk", flat=True))
