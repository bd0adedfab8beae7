"""Looking at replicas over their control listeners, and repairing what differs from its wish."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from datetime import timedelta
from functools import partial
from typing import Any, Final

import structlog
from django.db.models import F, Q, Value
from django.db.models.functions import Now

from controlplane.conductor.looks import Looks
from controlplane.models import Replica, ReplicaSlot, Run, Transfer, WorkUnit
from controlplane.selectors.answering import there
from controlplane.selectors.replica_tokens import Listener, replica_reach, replica_token
from controlplane.services.enrolment import lease_lapse, leases_lapsed
from controlplane.services.events import CONDUCTOR
from controlplane.services.fleet import slot_target
from controlplane.services.forgetting import replica_forget_itself, replicas_gone
from controlplane.services.metrics import CLUSTER_VERSION, ENGINE_IDLE_OF, Metric, metrics_record
from controlplane.services.replica_reports import ReplicaReport, SlotReport, replica_report
from controlplane.services.steering import replica_repair_itself, replicas_to_repair
from controlplane.services.transfers import transfer_fail
from controlplane.states import (
    UNDER_WAY,
    DesiredSource,
    ReplicaState,
    RunState,
    TransferState,
    WeightSlot,
    WorkKind,
    WorkState,
)
from rl_core.engines.control_client import CONTROL_S, ControlClient
from rl_core.engines.protocol import SlotState, SlotStatus
from rl_core.errors import EngineError
from rl_core.types import ClusterRole

log = structlog.get_logger(__name__)

RETRY_AFTER_S = 10.0
_MAX_NAME: Final = 64
_MAX_NUMBER: Final = 2.0**63
_CONCURRENT_LOOKS = 32
_LOOK_S = 10.0  # in all, for each of the two questions of a look
_replicas, _slots, _transfers, _series_of = Looks("replica"), Looks("slot"), Looks("transfer"), Looks("series of a run")


def fleet_poll() -> None:
    """Look at every replica and write down what it said; then the series that come of it."""
    replicas = Replica.objects.filter(there()).exclude(control_url="").select_related("cluster")
    with ThreadPoolExecutor(_CONCURRENT_LOOKS) as pool:
        looks = {pool.submit(look_at, replica): replica for replica in replicas}
        for look in as_completed(looks):
            _replicas.at(looks[look].pk, partial(_note, looks[look], look))
    _record_series()


def _note(replica: Replica, look: Future[ReplicaReport]) -> None:
    """Write down one look, with what the replica did since the look before."""
    report = look.result()
    if not report.reachable and replica.state == ReplicaState.OFFLINE:
        return
    if report.reachable:
        report.metrics.update(rates(replica.metrics, report.metrics))
    replica_report(replica=replica, report=report)


def look_at(replica: Replica) -> ReplicaReport:
    """One look at a replica. Never raises for a replica that is not well."""
    try:
        with control_client(replica, timeout_s=_LOOK_S) as client:
            status, metrics = client.status(), client.metrics()
    except OSError as error:
        return ReplicaReport(reachable=False, error=f"its control token does not read on this machine: {error}")
    except EngineError as error:
        return ReplicaReport(reachable=False, error=str(error))
    return ReplicaReport(
        reachable=True,
        slots={name: SlotReport(slot.version or "", slot.root, _fault(slot)) for name, slot in status.slots.items()},
        metrics={**_numbers(metrics), "polled_at": time.time()},
        error="; ".join(slot.error for slot in status.slots.values() if slot.error),
    )


def _numbers(told: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an engine's metrics, in all and by slot: whatever else it says there is not kept."""
    found: dict[str, Any] = {name[:_MAX_NAME]: value for name, value in told.items() if _plain(value)}
    slots = told.get("slots")
    if isinstance(slots, dict):
        found["slots"] = {name[:_MAX_NAME]: _numbers(of) for name, of in slots.items() if isinstance(of, dict)}
    return found


def _plain(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _MAX_NUMBER


def _fault(slot: SlotStatus) -> str:
    if slot.state is not SlotState.POISONED:
        return ""
    return f"poisoned: {slot.error}" if slot.error else "poisoned"


def control_client(replica: Replica, *, timeout_s: float = CONTROL_S) -> ControlClient:
    """A client of the replica's control listener. Raises: OSError when its token file is not there; EngineError."""
    token = replica_token(replica.pk, Listener.CONTROL, enrolment=replica.enrolment)
    return ControlClient(replica.control_url, token, reach=replica_reach(replica.enrolment), timeout_s=timeout_s)


def rates(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """What an engine did between two looks: the share of time it was idle, tokens generated a second.

    Empty when it cannot be told: no look before, or the engine was started again in between.
    """
    try:
        elapsed = now["polled_at"] - before["polled_at"]
        busy = now["busy_s_total"] - before["busy_s_total"]
        tokens = now["generated_tokens_total"] - before["generated_tokens_total"]
    except KeyError:
        return {}
    if elapsed <= 0 or busy < 0 or tokens < 0:
        return {}
    return {"idle_share": min(1.0, max(0.0, 1.0 - busy / elapsed)), "tokens_per_s": tokens / elapsed}


def slots_reconcile() -> int:
    """Target again every slot that holds another version than its wish with no transfer on the way; how many.

    Faulty slots are left to their repair.
    """
    bury_dead_transfers()
    # A failure is not tried again at once; and a look that began before a transfer ended may be written after it.
    recent = Transfer.objects.filter(
        state__in=[TransferState.FAILED, TransferState.DONE],
        finished_at__gt=Now() - Value(timedelta(seconds=RETRY_AFTER_S)),
    )
    astray = (
        ReplicaSlot.objects.filter(desired_version__isnull=False, replica__state__in=_REACHABLE, fault="")
        .exclude(current_version=F("desired_version"))
        .select_related("replica__cluster", "desired_version")
        .order_by("pk")
    )
    again = 0
    for slot in astray:
        here = Q(replica_id=slot.replica_id, slot=slot.slot)
        if not Transfer.objects.filter(here, state__in=UNDER_WAY).exists() and not recent.filter(here).exists():
            again += _slots.at(slot.pk, partial(_target_again, slot))
    return again


def _target_again(slot: ReplicaSlot) -> Transfer | None:
    holds = "another version" if slot.current_version_id else "no version of ours"
    return slot_target(
        replica=slot.replica,
        slot=WeightSlot(slot.slot),
        version=slot.desired_version,
        source=DesiredSource(slot.desired_source),
        actor=CONDUCTOR,
        reason=f"the replica reports {holds}",
    )


_REACHABLE = [ReplicaState.READY, ReplicaState.RECONCILING, ReplicaState.DRAINING, ReplicaState.DRAINED]


def leases_sweep() -> None:
    """Replicas whose lease is over are offline, for people to see; routing left them out by itself."""
    for replica in leases_lapsed():
        _replicas.at(replica.pk, partial(lease_lapse, replica=replica))


def replicas_sweep() -> None:
    """Replicas that registered themselves and whose lease was over for long leave the fleet."""
    for replica in replicas_gone():
        _replicas.at(replica.pk, partial(replica_forget_itself, replica=replica))


def poisoned_repair() -> None:
    """Repair faulty slots from snapshots, a few times for each replica; after that a person has to."""
    for replica in replicas_to_repair():
        _replicas.at(replica.pk, partial(replica_repair_itself, replica=replica))


def bury_dead_transfers() -> None:
    """Transfers whose unit is dead have failed. A replayed unit's transfer is pending again."""
    dead = WorkUnit.objects.filter(kind=WorkKind.TRANSFER, state=WorkState.DEAD)
    rows = Transfer.objects.filter(state__in=UNDER_WAY, pk__in=dead.values("ref"))
    for transfer in rows.select_related("replica__cluster", "version"):
        unit = dead.filter(ref=transfer.pk).first()
        reason = unit.error if unit else "its work died"
        _transfers.at(transfer.pk, partial(transfer_fail, transfer=transfer, reason=reason))


def _record_series() -> None:
    """Idle share, tokens a second and version of each rollout cluster, for running runs whose versions they hold."""
    for run in Run.objects.filter(state=RunState.RUNNING).select_related("lineage"):
        slots = ReplicaSlot.objects.filter(
            desired_version__lineage_id=run.lineage_id, replica__cluster__role=ClusterRole.ROLLOUT.value
        ).select_related("replica__cluster", "current_version")
        _series_of.at(run.pk, partial(_record, run, list(slots)))


def _record(run: Run, slots: list[ReplicaSlot]) -> None:
    metrics_record(run=run, values=_series(slots, run), actor=CONDUCTOR)


def _series(slots: list[ReplicaSlot], run: Run) -> dict[str, float]:
    idle: dict[str, list[float]] = defaultdict(list)
    values: dict[str, float] = {}
    for slot in slots:
        cluster, metrics = slot.replica.cluster.slug, slot.replica.metrics
        if "idle_share" in metrics and slot.replica.state != ReplicaState.OFFLINE:
            idle[cluster].append(metrics["idle_share"])
            values[Metric.TOKENS_PER_S] = values.get(Metric.TOKENS_PER_S, 0.0) + metrics["tokens_per_s"]
        version = slot.current_version
        if version is not None and version.lineage_id == run.lineage_id:
            name = f"{CLUSTER_VERSION}{cluster}"
            values[name] = min(values.get(name, version.number), version.number)
    for cluster, shares in idle.items():
        values[f"{ENGINE_IDLE_OF}{cluster}"] = sum(shares) / len(shares)
    every = [share for shares in idle.values() for share in shares]
    if every:
        values[Metric.ENGINE_IDLE] = sum(every) / len(every)
    return values
