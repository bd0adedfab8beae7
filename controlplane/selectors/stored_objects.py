"""What the objects of the store are for: which of them no row names, and why.

Blobs are named by columns. The objects of a publication lie under the folder of its manifest, and belong to it even
before it is written: an attempt's folder carries the attempt's fence, a derived publication's its id.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Final

from django.db import connection
from django.db.models import Model

from controlplane.models import (
    BatchItem,
    ExportPart,
    Generation,
    ModelCard,
    PolicyVersion,
    Publication,
    Rollout,
    RolloutCall,
)
from controlplane.states import VersionState
from rl_core.store import PROBES

BLOBS, LINEAGES, SNAPSHOTS = "blobs", "lineages", "snapshots"
CLOCK: Final = "clock"  # where the store is asked for its time
_PASSING: Final = (CLOCK, PROBES)  # whoever wrote an object there deletes it at once, unless it is killed
FOLDERS: Final = (BLOBS, LINEAGES, SNAPSHOTS, *_PASSING)  # objects elsewhere are not ours to collect

BLOB_COLUMNS: Final[tuple[tuple[type[Model], str], ...]] = (
    (Rollout, "trajectory_key"),
    (Rollout, "session_key"),
    (BatchItem, "trajectory_key"),
    (Generation, "content_key"),
    (RolloutCall, "blob_key"),
    (ExportPart, "blob_key"),
)
_PUBLICATION: Final = re.compile(r"(.+?)(?:/parts/\d+)?/(?:manifest\.json|segments/[^/]+)")
_UUID: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ATTEMPT: Final = re.compile(rf"lineages/({_UUID})/(\d{{1,9}})-(\d{{1,9}})/(\d{{1,9}})")
_DERIVED: Final = re.compile(rf".+/derived-({_UUID})/\d+")


def unneeded(keys: Iterable[str]) -> dict[str, str]:
    """Those of the keys that no row names, each with the reason. Keys outside `FOLDERS` are never among them."""
    blobs, folders, passing = [], {}, []
    for key in keys:
        match = _PUBLICATION.fullmatch(key)
        if key.startswith(f"{BLOBS}/"):
            blobs.append(key)
        elif key.partition("/")[0] in _PASSING:
            passing.append(key)
        elif match and key.startswith((f"{LINEAGES}/", f"{SNAPSHOTS}/")):
            folders[key] = match[1]
    reasons = dict.fromkeys(_unnamed(blobs), "no row names this blob")
    reasons.update((key, "left by a process that was killed") for key in passing)
    dead = _dead_folders(set(folders.values()))
    reasons.update((key, dead[folder]) for key, folder in folders.items() if folder in dead)
    return reasons


def _unnamed(blobs: list[str]) -> list[str]:
    if not blobs:
        return []
    named = " AND ".join(
        f"NOT EXISTS (SELECT 1 FROM {model._meta.db_table} WHERE {column} = key)"  # noqa: S608
        for model, column in BLOB_COLUMNS
    )
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT key FROM unnest(%s::text[]) AS key WHERE {named}", [blobs])  # noqa: S608
        return [row[0] for row in cursor.fetchall()]


def _dead_folders(folders: set[str]) -> dict[str, str]:
    """Folders that no row names. What is unfinished is asked between two looks at what is named, as a commit ends the
    one and begins the other at once.
    """
    unnamed = {folder for folder in folders - _named(folders) if not _unfinished(folder)}
    unnamed -= _named(unnamed)
    let_go = Publication.objects.filter(manifest_key__in=map(_manifest, unnamed)).select_related("version")
    reasons = {row.manifest_key: f"{row.kind} of {row.version.ref}: no version needs it" for row in let_go}
    return {folder: reasons.get(_manifest(folder)) or _orphaned(folder) for folder in unnamed}


def _named(folders: set[str]) -> set[str]:
    keys = {_manifest(folder): folder for folder in folders}
    live = Publication.objects.filter(manifest_key__in=keys, deleted_at__isnull=True)
    models = ModelCard.objects.filter(manifest_key__in=keys)
    named = {*live.values_list("manifest_key", flat=True), *models.values_list("manifest_key", flat=True)}
    return {keys[key] for key in named}


def _manifest(folder: str) -> str:
    return f"{folder}/manifest.json"


def _unfinished(folder: str) -> bool:
    """Whether somebody may still be publishing under the folder."""
    derived, attempt = _DERIVED.fullmatch(folder), _ATTEMPT.fullmatch(folder)
    if derived:
        planned = Publication.objects.filter(published_at__isnull=True, deleted_at__isnull=True)
        return planned.filter(pk=uuid.UUID(derived[1])).exists()
    if not attempt:
        return False
    publishing = PolicyVersion.objects.filter(state=VersionState.PUBLISHING, lineage_id=uuid.UUID(attempt[1]))
    return publishing.filter(epoch=attempt[2], number=attempt[3], fence__lte=attempt[4]).exists()


def _orphaned(folder: str) -> str:
    attempt = _ATTEMPT.fullmatch(folder)
    if attempt is None:
        return "no row names this publication"
    version = PolicyVersion.objects.filter(
        lineage_id=uuid.UUID(attempt[1]), epoch=attempt[2], number=attempt[3]
    ).first()
    if version is None:
        return "of a version that is not there"
    return f"of an attempt at {version.ref} that was not committed (the version is {version.state})"
