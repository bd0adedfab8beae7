"""Exports: a version as the files of a Hugging Face folder, written by a worker, kept in the store until deleted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import Value
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import Export, ExportFile, ExportPart, PolicyVersion, WorkUnit
from controlplane.services.events import SYSTEM, Actor, event_append, project_topic, require_reason
from controlplane.services.retention import version_hold
from controlplane.services.work import Claim, work_enqueue, work_fenced, work_finish, work_replay
from controlplane.states import ActorKind, EventType, ExportState, VersionState, WorkKind, WorkState
from rl_core.types import WeightFormat

EXPORTER = Actor(ActorKind.WORKER, "export")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of a folder and where it stands: the keys and sizes of its parts, in order."""

    name: str
    sha256: str
    parts: Sequence[tuple[str, int]]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(size for _, size in self.parts)


@transaction.atomic
def version_export(*, version: PolicyVersion, weight_format: WeightFormat, actor: Actor, reason: str) -> Export:
    """Want the version as files. What stands or is being written already is returned; what failed is tried again.

    Raises: Conflict when the version is not committed, or retired; Invalid without a reason.
    """
    require_reason(reason, "say what the weights are exported for")
    if version.state != VersionState.COMMITTED:
        raise Conflict(f"version {version.ref} is {version.state}: only a committed version can be exported")
    version_hold(version)
    row, created = Export.objects.get_or_create(version=version, format=weight_format.value, deleted_at=None)
    if created:
        work_enqueue(kind=WorkKind.EXPORT, ref=row.pk, project_id=version.lineage.project_id)
        _event(row, ExportState.PENDING, actor, reason)
    elif failed := WorkUnit.objects.filter(kind=WorkKind.EXPORT, ref=row.pk, state=WorkState.DEAD).first():
        work_replay(unit=failed, actor=actor, reason=reason)
    return row


def export_begin(claim: Claim) -> Export | None:
    """What to write; None when it stands or is not wanted any more (the unit is then finished)."""
    with work_fenced(claim):
        row = Export.objects.select_related("version__lineage__model").get(pk=claim.ref)
        if row.written_at is not None or row.deleted_at is not None:
            work_finish(claim)
            return None
    return row


def export_done(claim: Claim, *, export: Export, files: Sequence[WrittenFile]) -> None:
    """Its files stand in the store. One that was deleted meanwhile stays so. Raises: StaleFence."""
    with work_fenced(claim):
        work_finish(claim)
        wanted = Export.objects.filter(pk=export.pk, deleted_at__isnull=True, written_at__isnull=True)
        if not wanted.update(written_at=Now(), bytes=sum(file.bytes for file in files)):
            return
        for file in files:
            row = ExportFile.objects.create(export=export, name=file.name, bytes=file.bytes, sha256=file.sha256)
            ExportPart.objects.bulk_create(
                [
                    ExportPart(file=row, position=position, blob_key=key, bytes=size)
                    for position, (key, size) in enumerate(file.parts)
                ],
                batch_size=1000,
            )
        _event(export, ExportState.READY, EXPORTER, "")


@transaction.atomic
def export_delete(*, export: Export, actor: Actor, reason: str) -> None:
    """Let its files go: nobody is given them any more, and the store is rid of them after the grace period.

    Raises: Conflict when that was done already; Invalid without a reason.
    """
    require_reason(reason, "say why the export is deleted")
    if not Export.objects.filter(pk=export.pk, deleted_at__isnull=True).update(deleted_at=Now()):
        raise Conflict("the export is deleted already")
    export.files.all().delete()
    _event(export, ExportState.DELETED, actor, reason)


def exports_expire() -> int:
    """Delete what was written `EXPORT_DAYS` ago; how many."""
    if not settings.EXPORT_DAYS:
        return 0
    before = Now() - Value(timedelta(days=settings.EXPORT_DAYS))
    old = Export.objects.filter(deleted_at__isnull=True, written_at__lt=before).order_by("written_at")
    gone = 0
    for export in old[:100]:
        with suppress(Conflict):  # somebody else deleted it just now
            export_delete(export=export, actor=SYSTEM, reason=f"written {settings.EXPORT_DAYS} days ago")
            gone += 1
    return gone


def export_scratch(export: Export) -> Path:
    """Where a worker writes the folder before its files go to the store."""
    return _scratch() / str(export.pk)


def scratch_unwanted() -> list[Path]:
    """Folders of this machine that no attempt takes up any more: their unit has ended, or is gone."""
    found = list(_scratch().iterdir()) if _scratch().is_dir() else []
    # After the folders: who makes one has its unit already.
    units = WorkUnit.objects.filter(kind=WorkKind.EXPORT, state__in=[WorkState.QUEUED, WorkState.LEASED])
    wanted = {str(ref) for ref in units.values_list("ref", flat=True)}
    return [path for path in found if path.name not in wanted]


def _scratch() -> Path:
    return settings.STATE_DIR / "exports"


def _event(export: Export, state: ExportState, actor: Actor, reason: str) -> None:
    version = export.version
    event_append(
        project_id=version.lineage.project_id,
        topic=project_topic(version.lineage.project_id),
        event_type=EventType.EXPORT_CHANGED,
        actor=actor,
        reason=reason,
        data={"export": str(export.pk), "version": str(version.ref), "format": export.format, "state": state.value},
    )
