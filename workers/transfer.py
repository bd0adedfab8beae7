"""The transfer queue: tell a replica what a slot should hold, wait until it does, check that it does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import structlog
from django.conf import settings

from controlplane.conductor.fleet import control_client
from controlplane.models import Run, Transfer
from controlplane.selectors.publications import reading_of
from controlplane.selectors.transfer_plans import transfer_plan
from controlplane.services.transfers import (
    TransferProgress,
    TransferReport,
    transfer_begin,
    transfer_done,
    transfer_goes_on,
    transfer_make_room,
    transfer_progress,
)
from controlplane.services.work import Claim
from controlplane.states import WorkKind
from rl_core.engines.control_client import ControlClient
from rl_core.engines.protocol import SlotState, SlotStatus
from rl_core.errors import EngineUnreachable, WeightsError
from rl_core.types import KvMode
from workers.base import Attempt, unit_task

log = structlog.get_logger(__name__)

_POLL_S = 1.0
_SLICE_S = 5.0  # after which a transfer makes room for one that waits
_SETTLE_S = 0.2
_PROGRESS_EVERY_S = 2.0  # rows and events of a transfer that takes long


class ReconcileFailed(WeightsError):
    """The replica gave its target up; its own words are in the message. A retry targets it again."""

    code: ClassVar[str] = "reconcile_failed"
    retryable: ClassVar[bool] = True


class WeightsGone(WeightsError):
    """No publication of the version is left. Nothing that a replica may be told to hold ever comes to this."""

    code: ClassVar[str] = "weights_gone"


@unit_task(WorkKind.TRANSFER)
def transfer(attempt: Attempt) -> None:
    """One replica slot to one version."""
    row = transfer_begin(attempt.claim)
    if row is None:
        return
    try:
        client = control_client(row.replica)
    except OSError as error:
        raise EngineUnreachable(f"the control token of replica {row.replica.name} does not read: {error}") from error
    with client:
        goes_on = transfer_goes_on(attempt.claim)
        if not goes_on:
            _tell(client, row)
        status = _wait(client, row, attempt, slice_s=0.0 if goes_on else _SLICE_S)
    if status is not None:
        transfer_done(attempt.claim, report=_report(status))
        log.info("transfer_done", replica=row.replica.name, version=str(row.version.ref))


def _tell(client: ControlClient, row: Transfer) -> None:
    """Set the slot's target. Raises: WeightsGone, EngineError."""
    plan = transfer_plan(row)
    reading = reading_of(row.version, since=row.from_version)
    if reading is None:
        raise WeightsGone(f"nothing in the store leads to version {row.version.ref}: target another one")
    client.set_target(
        version=str(row.version.ref),
        root=reading.root,
        manifest=reading.manifest,
        snapshot=reading.snapshot or None,
        deltas=reading.deltas,
        peers=plan.peers,
        limit_bytes_s=plan.limit_bytes_s,
        repair=row.repair,
        slot=row.slot,
        kv=_kv_mode(row),
    )


def _wait(client: ControlClient, row: Transfer, attempt: Attempt, *, slice_s: float) -> SlotStatus | None:
    """Poll until the slot serves the version; None when, after `slice_s`, it made room for others that wait.

    Raises: ReconcileFailed, EngineError, StaleFence.
    """
    wanted = str(row.version.ref)
    meter = _Meter(attempt.claim)
    until_s = time.monotonic() + slice_s
    while True:
        attempt.check()
        status = client.wait_version(wanted, slot=row.slot, timeout_s=min(_POLL_S, settings.LEASE_S / 3))
        if status.version == wanted and status.state is SlotState.READY and not status.error:
            return status
        meter.note(status)
        if status.state is SlotState.RECONCILING:
            time.sleep(_SETTLE_S if status.version == wanted else 0.0)  # a repair: it says so already
        elif status.target == wanted and (status.error or status.state is SlotState.POISONED):
            raise ReconcileFailed(f"replica {row.replica.name}: {status.error_code}: {status.error}")
        if status.target != wanted:
            raise ReconcileFailed(
                f"replica {row.replica.name} has target {status.target or 'none'}, not {wanted}: it was started again "
                "or told otherwise"
            )
        if time.monotonic() >= until_s and transfer_make_room(attempt.claim):
            return None


@dataclass(slots=True)
class _Meter:
    """Writes progress down now and then: the first time as soon as there is any."""

    claim: Claim
    _due: float = 0.0

    def note(self, status: SlotStatus) -> None:
        """Raises: StaleFence."""
        now = status.progress
        if now is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _PROGRESS_EVERY_S
        transfer_progress(
            self.claim,
            progress=TransferProgress(
                phase=now.phase.value,
                done_bytes=now.done_bytes,
                total_bytes=now.total_bytes,
                bytes_per_s=now.bytes_per_s,
                remaining_s=now.remaining_s,
            ),
        )


def _report(status: SlotStatus) -> TransferReport:
    update = status.update
    if update is None:
        return TransferReport(root=status.root, fetched_bytes=0, hops=0, timings={})
    names = ("fetch_s", "decode_s", "verify_s", "stage_s", "pause_s")
    from_store = update.bytes_fetched - update.bytes_from_peers
    return TransferReport(
        root=status.root,
        fetched_bytes=update.bytes_fetched,
        hops=update.hops,
        timings={name: getattr(update, name) for name in names},
        store_bytes_s=from_store / update.store_s if from_store and update.store_s else None,
    )


def _kv_mode(row: Transfer) -> KvMode:
    run = Run.objects.filter(lineage_id=row.version.lineage_id).only("spec").first()
    return KvMode(run.spec["kv_mode"]) if run else KvMode.KEEP
