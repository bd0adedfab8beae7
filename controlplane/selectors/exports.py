"""Reads of exports: how far they are, their files, and the bytes of a file a part at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import lru_cache
from uuid import UUID

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db.models import Case, CharField, OuterRef, Prefetch, QuerySet, Subquery, Value, When
from django.db.models.functions import Coalesce

from controlplane.models import Export, ExportFile, PolicyVersion, Project, WorkUnit
from controlplane.states import ExportState, WorkKind, WorkState
from rl_core.store import ObjectStore, open_store

_NONE = Value("")


def exports_of(project: Project, *, version: PolicyVersion | None = None) -> QuerySet[Export]:
    """A project's exports, or those of one version, each with its `state` and what went wrong last (`error`)."""
    rows = Export.objects.filter(version__lineage__project=project)
    if version is not None:
        rows = rows.filter(version=version)
    unit = WorkUnit.objects.filter(kind=WorkKind.EXPORT, ref=OuterRef("pk"))
    state = Case(
        When(deleted_at__isnull=False, then=Value(ExportState.DELETED.value)),
        When(written_at__isnull=False, then=Value(ExportState.READY.value)),
        When(unit_state=WorkState.DEAD, then=Value(ExportState.FAILED.value)),
        default=Value(ExportState.PENDING.value),
        output_field=CharField(),
    )
    error = Case(
        When(
            written_at__isnull=True, deleted_at__isnull=True, then=Coalesce(Subquery(unit.values("error")[:1]), _NONE)
        ),
        default=_NONE,
        output_field=CharField(),
    )
    found = rows.select_related("version").prefetch_related(Prefetch("files", ExportFile.objects.order_by("name")))
    return found.annotate(unit_state=Subquery(unit.values("state")[:1]), state=state, error=error)


def export_file(project: Project, export_id: UUID, name: str) -> ExportFile | None:
    """A file of an export that is ready; None where there is none of that name."""
    if "\x00" in name:  # PostgreSQL refuses to look for it
        return None
    rows = ExportFile.objects.filter(export__version__lineage__project=project, export__deleted_at__isnull=True)
    return rows.select_related("export__version").filter(export_id=export_id, name=name).first()


def parts_of(file: ExportFile) -> list[tuple[str, int]]:
    """Keys and sizes of the file's parts, in order."""
    return list(file.parts.order_by("position").values_list("blob_key", "bytes"))


async def pieces(parts: list[tuple[str, int]], *, start: int, end: int) -> AsyncIterator[bytes]:
    """The bytes from `start` to before `end` of the parts end to end; one part is in memory at a time, and checked.

    Raises: ObjectMissing, DigestMismatch, StoreUnavailable.
    """
    offset = 0
    for key, size in parts:
        low, high = max(start - offset, 0), min(end - offset, size)
        offset += size
        if low < high:
            data = await sync_to_async(_store().get_blob, thread_sensitive=False)(key)
            yield data[low:high]


@lru_cache(maxsize=1)
def _store() -> ObjectStore:
    return open_store(settings.STORE_URL)
