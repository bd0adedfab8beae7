"""Garbage collection: objects that no row names are marked, and deleted when the mark has stood long enough.

Three things keep what somebody may still want. An object is marked and deleted only when the store wrote it longer ago
than the grace period, by the store's own clock: what is being published is younger. A mark has to stand for the grace
period too, by the database's clock, and what came into use meanwhile is unmarked: readers of a publication that was let
go have that long to finish, and writers that adopted a blob to commit. And the object is deleted under the lock of its
mark, after the rows were read once more. So any number of collectors may run, and be killed at any moment: what a mark
stands for is either still there or is found to be gone.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet, Value
from django.db.models.functions import Now

from controlplane.models import Garbage
from controlplane.selectors.stored_objects import CLOCK, FOLDERS, unneeded
from rl_core.errors import ObjectMissing
from rl_core.store import ObjectInfo, ObjectStore

log = structlog.get_logger(__name__)

LOOKED_AT: Final = 20_000  # objects whose rows are asked for at once
DELETED: Final = 50  # marks that are locked at once: a writer that wants one back waits for so many deletions


@dataclass(frozen=True, slots=True)
class Unneeded:
    """An object that no row names: since when it is marked, and whether it would be deleted now."""

    info: ObjectInfo
    reason: str
    marked_at: datetime | None
    due: bool


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collection did."""

    marked: int
    unmarked: int
    deleted: int
    deleted_bytes: int


def garbage_collect(store: ObjectStore) -> Collected:
    """Mark what no row names, then delete what was marked long enough ago. Raises: StoreUnavailable."""
    before = store_time(store) - timedelta(seconds=settings.GARBAGE_GRACE_S)
    marked = sum(_mark(batch) for batch in _batches(_old_objects(store, before)))
    unmarked = deleted = size = 0
    while batch := _sweep(store, before):
        unmarked, deleted, size = unmarked + batch.unmarked, deleted + batch.deleted, size + batch.deleted_bytes
    found = Collected(marked, unmarked, deleted, size)
    log.info("garbage_collected", marked=marked, unmarked=unmarked, deleted=deleted, deleted_bytes=size)
    return found


def garbage_found(store: ObjectStore) -> Iterator[Unneeded]:
    """What a collection would mark or delete now, and why. Writes no row and deletes nothing."""
    before = store_time(store) - timedelta(seconds=settings.GARBAGE_GRACE_S)
    for batch in _batches(_old_objects(store, before)):
        infos = {info.key: info for info in batch}
        reasons = unneeded(infos)
        marks = dict(Garbage.objects.filter(pk__in=reasons).values_list("key", "marked_at"))
        due = set(_due().filter(pk__in=reasons).values_list("key", flat=True))
        for key, reason in sorted(reasons.items()):
            yield Unneeded(infos[key], reason, marks.get(key), key in due)


def store_time(store: ObjectStore) -> datetime:
    """The store's clock: when it says that an object was written that is written now. Raises: StoreUnavailable."""
    key = f"{CLOCK}/{uuid.uuid4()}"
    store.put(key, b"what time is it?")
    try:
        return store.head(key).modified
    finally:
        store.delete(key)


def _old_objects(store: ObjectStore, before: datetime) -> Iterator[ObjectInfo]:
    for folder in FOLDERS:
        yield from (info for info in store.list(folder) if info.modified < before)


def _batches(infos: Iterator[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    while batch := list(islice(infos, LOOKED_AT)):
        yield batch


def _mark(batch: list[ObjectInfo]) -> int:
    infos = {info.key: info for info in batch}
    reasons = unneeded(infos)
    known = set(Garbage.objects.filter(pk__in=reasons).values_list("key", flat=True))
    fresh = [
        Garbage(key=key, bytes=infos[key].size_bytes, reason=reason[:200])
        for key, reason in reasons.items()
        if key not in known
    ]
    Garbage.objects.bulk_create(fresh, ignore_conflicts=True)
    return len(fresh)


def _due() -> QuerySet[Garbage]:
    return Garbage.objects.filter(marked_at__lt=Now() - Value(timedelta(seconds=settings.GARBAGE_GRACE_S)))


def _sweep(store: ObjectStore, before: datetime) -> Collected | None:
    """Delete one batch of what was marked long enough ago, manifests first: what has no manifest is not read anew."""
    with transaction.atomic():
        marks = list(_due().select_for_update(skip_locked=True).order_by("marked_at", "key")[:DELETED])
        if not marks:
            return None
        keys = [mark.key for mark in marks]
        reasons = unneeded(keys)
        size = deleted = 0
        for mark in sorted(marks, key=lambda mark: "/segments/" in mark.key):
            if mark.key in reasons and _delete(store, mark.key, before):
                size, deleted = size + mark.bytes, deleted + 1
        Garbage.objects.filter(pk__in=keys).delete()
    return Collected(0, len(keys) - deleted, deleted, size)


def _delete(store: ObjectStore, key: str, before: datetime) -> bool:
    try:
        if store.head(key).modified >= before:
            return False  # deleted once and written again since: it is somebody's
    except ObjectMissing:
        return False
    store.delete(key)
    return True
