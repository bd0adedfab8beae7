"""The transfer queue: tell a replica what a slot should hold, wait until it does, check that it does."""

from __future__ import annotations

from typing import ClassVar

import structlog
from django.conf import settings

from controlplane.conductor.fleet import control_client
from controlplane.models import Run, Transfer
from controlplane.services.transfers import TransferReport, transfer_begin, transfer_done
from controlplane.states import WorkKind
from rl_core.engines.client import ControlClient
from rl_core.engines.protocol import SlotState, SlotStatus
from rl_core.errors import EngineUnreachable, WeightsError
from rl_core.types import KvMode
from workers.base import Attempt, unit_task

log = structlog.get_logger(__name__)

_POLL_S = 5.0


class ReconcileFailed(WeightsError):
    """The replica gave its target up; its own words are in the message. A retry targets it again."""

    code: ClassVar[str] = "reconcile_failed"
    retryable: ClassVar[bool] = True


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
        client.set_target(
            version=str(row.version.ref),
            root=row.version.root,
            manifest=row.version.manifest_key,
            snapshot=row.version.snapshot_key or None,
            slot=row.slot,
            kv=_kv_mode(row),
        )
        status = _wait(client, row, attempt)
    transfer_done(attempt.claim, report=_report(status))
    log.info("transfer_done", replica=row.replica.name, version=str(row.version.ref))


def _wait(client: ControlClient, row: Transfer, attempt: Attempt) -> SlotStatus:
    """Poll until the slot serves the version. Raises: ReconcileFailed, EngineUnreachable, StaleFence."""
    wanted = str(row.version.ref)
    while True:
        attempt.check()
        status = client.wait_version(wanted, slot=row.slot, timeout_s=min(_POLL_S, settings.LEASE_S / 3))
        if status.version == wanted:
            return status
        if status.state is not SlotState.RECONCILING and status.target == wanted and status.error:
            raise ReconcileFailed(f"replica {row.replica.name}: {status.error_code}: {status.error}")
        if status.target != wanted:
            raise ReconcileFailed(
                f"replica {row.replica.name} has target {status.target or 'none'}, not {wanted}: it was started again "
                "or told otherwise"
            )


def _report(status: SlotStatus) -> TransferReport:
    update = status.update
    if update is None:
        return TransferReport(root=status.root, fetched_bytes=0, hops=0, timings={})
    names = ("fetch_s", "decode_s", "verify_s", "stage_s", "pause_s")
    return TransferReport(
        root=status.root,
        fetched_bytes=update.bytes_fetched,
        hops=update.hops,
        timings={name: getattr(update, name) for name in names},
    )


def _kv_mode(row: Transfer) -> KvMode:
    run = Run.objects.filter(lineage_id=row.version.lineage_id).only("spec").first()
    return KvMode(run.spec["kv_mode"]) if run else KvMode.KEEP
