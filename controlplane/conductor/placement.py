"""Which version each replica of a run should hold: the head, unless an evaluation needs another for a while."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.conductor.context import StageContext
from controlplane.models import Evaluation, PolicyVersion, ReplicaSlot, Transfer
from controlplane.services.events import CONDUCTOR
from controlplane.services.fleet import slot_target
from controlplane.states import DesiredSource, EvaluationState, ReplicaState, StepState, TransferState, WeightSlot


@dataclass(frozen=True, slots=True)
class Wish:
    """What a slot should hold, and why."""

    version: PolicyVersion
    source: DesiredSource


def retarget_one(context: StageContext) -> bool:
    """Target the first replica of the run that should hold another version than it is told to; whether there was one.

    One a transaction: slots are contended with transfers that finish, and the project's log is locked by each.
    A replica that is on its way to a version of this run is left to arrive first, unless it is needed for an
    evaluation.
    """
    slots = list(
        ReplicaSlot.objects.filter(replica__cluster__in=context.clusters, slot=WeightSlot.DEFAULT.value)
        .exclude(replica__state__in=[ReplicaState.OFFLINE, ReplicaState.POISONED])
        .filter(fault="")
        .exclude(desired_source=DesiredSource.PINNED)
        .select_related("replica__cluster", "desired_version")
        .order_by("replica__cluster__slug", "replica__name")
    )
    wishes = _wishes(context, slots)
    for slot in slots:
        wish = wishes[slot.pk]
        if slot.desired_version_id == wish.version.pk and slot.desired_source == wish.source:
            continue
        if wish.source == DesiredSource.TRAINING_HEAD and _arriving(slot, context):
            continue
        slot_target(
            replica=slot.replica,
            slot=WeightSlot.DEFAULT,
            version=wish.version,
            source=wish.source,
            actor=CONDUCTOR,
        )
        return True
    return False


def _wishes(context: StageContext, slots: list[ReplicaSlot]) -> dict[object, Wish]:
    wishes: dict[object, Wish] = {slot.pk: Wish(context.head, DesiredSource.TRAINING_HEAD) for slot in slots}
    free = list(slots)
    for evaluation in _open_evaluations(context):
        if not free:
            break
        if evaluation.version_id == context.head.pk or _at_the_start(context, evaluation):
            # Nothing newer to roll out with yet, or nothing to roll out any more: all of them evaluate.
            return {slot.pk: Wish(evaluation.version, DesiredSource.TRAINING_HEAD) for slot in slots}
        pinned = next((slot for slot in free if slot.desired_version_id == evaluation.version_id), free[-1])
        free.remove(pinned)
        wishes[pinned.pk] = Wish(evaluation.version, DesiredSource.EVALUATION)
    return wishes


def _open_evaluations(context: StageContext) -> list[Evaluation]:
    states = [EvaluationState.PENDING, EvaluationState.RUNNING]
    rows = Evaluation.objects.filter(run=context.run, state__in=states)
    return list(rows.select_related("version").order_by("created_at"))


def _at_the_start(context: StageContext, evaluation: Evaluation) -> bool:
    """Whether it is the evaluation before the stage's first step."""
    first = context.stage.steps.filter(state=StepState.PUBLISHED).order_by("number").values("base_version")[:1]
    return not first or first[0]["base_version"] == evaluation.version_id


def _arriving(slot: ReplicaSlot, context: StageContext) -> bool:
    return Transfer.objects.filter(
        replica_id=slot.replica_id,
        slot=slot.slot,
        state=TransferState.RUNNING,
        version__lineage_id=context.run.lineage_id,
    ).exists()
