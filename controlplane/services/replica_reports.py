"""What replicas say of themselves: written down as it came, and held against what they should say."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from controlplane.models import PolicyVersion, Replica, ReplicaSlot, Transfer
from controlplane.services.events import SYSTEM, event_append, project_topic
from controlplane.services.transitions import transition
from controlplane.states import EventType, ReplicaState, TransferState
from rl_core.errors import SpecError
from rl_core.types import VersionRef


@dataclass(frozen=True, slots=True)
class SlotReport:
    """What one weight slot of a replica said it holds; `version` in text form, empty for none.

    `fault` is the replica's own word that the slot's weights are not to be trusted.
    """

    version: str = ""
    root: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One look at a replica. `error` is set when it did not answer or says that it is not well."""

    reachable: bool
    slots: dict[str, SlotReport] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def replica_report(*, replica: Replica, report: ReplicaReport) -> Replica:
    """Write down one look at a replica; an event only when its state or what it holds changed.

    A slot that says another root for a version than the version's own is faulty, whatever the replica thinks of it. A
    faulty slot is out of routing; a replica of which every slot is faulty is poisoned.
    """
    with transaction.atomic():
        # As `replica_locked`, with what the database's clock says of its lease.
        rows = Replica.objects.select_for_update(no_key=True, of=("self",)).select_related("cluster")
        row = rows.annotate(lapsed=Q(lease_until__isnull=False, lease_until__lte=Now())).get(pk=replica.pk)
        faults: list[str] = []
        changed = report.reachable and _note_slots(row, report, faults)
        state = _state_of(row, report, poisoned=_all_faulty(row, faults), lapsed=row.lapsed)
        error = "; ".join(faults) or report.error or ("its lease lapsed" if row.lapsed else "")
        values: dict[str, Any] = {"error": error[:500], "metrics": report.metrics}
        if report.reachable:
            values["seen_at"] = Now()
        if state != row.state:
            transition(row, to=state, **values)
            changed = True
        else:
            Replica.objects.filter(pk=row.pk).update(**values)
        if changed:
            replica_changed(row, error=error)
    row.refresh_from_db()
    return row


def replica_changed(replica: Replica, *, error: str = "") -> None:
    """Append the replica's present state to its project's log."""
    project_id = replica.cluster.project_id
    event_append(
        project_id=project_id,
        topic=project_topic(project_id),
        event_type=EventType.REPLICA_CHANGED,
        actor=SYSTEM,
        data={
            "replica": str(replica.pk),
            "cluster": replica.cluster.slug,
            "name": replica.name,
            "state": ReplicaState(replica.state).value,
            "error": error[:200],
        },
    )


def version_of(text: str) -> PolicyVersion | None:
    """The version that an engine names, or None when it is not one of ours."""
    try:
        ref = VersionRef.parse(text)
        lineage = uuid.UUID(ref.lineage)
    except (SpecError, ValueError):
        return None
    return PolicyVersion.objects.filter(lineage_id=lineage, epoch=ref.epoch, number=ref.number).first()


def idle_in(metrics: dict[str, Any], slot: str = "") -> bool:
    """Whether nothing ran or waited at the last look, in one slot or in all; False where that was not told."""
    counted = metrics.get("slots", {}).get(slot, {}) if slot else metrics
    return bool(counted.get("running", 1) == 0 and counted.get("waiting", 1) == 0)


def requests_in(metrics: dict[str, Any], slot: str = "") -> float:
    """How many requests ran or waited at the last look, in one slot or in all; 0 where that was not told."""
    counted = metrics.get("slots", {}).get(slot, {}) if slot else metrics
    return float(counted.get("running", 0) + counted.get("waiting", 0))


def _note_slots(replica: Replica, report: ReplicaReport, faults: list[str]) -> bool:
    """Write what the slots hold now, and collect what is wrong with it; whether anything is another than before."""
    changed = False
    for slot in ReplicaSlot.objects.filter(replica=replica).order_by("slot"):
        said = report.slots.get(slot.slot, SlotReport())
        version = version_of(said.version)
        fault = said.fault or _lie(version, said.root)
        if fault:
            faults.append(f"slot {slot.slot}: {fault}")
        before = (slot.current_version_id, slot.current_root, slot.fault)
        root = said.root[:64]
        now = (version.pk if version else None, root, fault[:500])
        changed = changed or before != now
        lost = slot.desired_version_id is not None and before[0] == slot.desired_version_id != now[0]
        since = {"desired_at": Now()} if lost else {}
        ReplicaSlot.objects.filter(pk=slot.pk).update(
            current_version=version, current_root=root, fault=fault[:500], reported_at=Now(), **since
        )
    return changed


def _all_faulty(replica: Replica, faults: list[str]) -> bool:
    return bool(faults) and len(faults) == replica.slots.count()


def _lie(version: PolicyVersion | None, root: str) -> str:
    if version is None or not version.root or not root or root == version.root:
        return ""
    return f"it reports root {root[:16]}… for {version.ref}, whose root is {version.root[:16]}…"


def _state_of(replica: Replica, report: ReplicaReport, *, poisoned: bool, lapsed: bool) -> ReplicaState:
    if not report.reachable or lapsed:
        return ReplicaState.OFFLINE
    if poisoned:
        return ReplicaState.POISONED
    moving = Transfer.objects.filter(replica=replica, state=TransferState.RUNNING).exists()
    if replica.drained_at is not None:
        return ReplicaState.DRAINED if idle_in(report.metrics) else ReplicaState.DRAINING
    return ReplicaState.RECONCILING if moving else ReplicaState.READY
