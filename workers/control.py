"""The control queue: writing a version out as the files of a Hugging Face folder."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Final

import structlog
from django.conf import settings

from controlplane.celery import VERSION_TIME_LIMIT_S
from controlplane.models import PolicyVersion
from controlplane.services.blobs import blob_put
from controlplane.services.exports import WrittenFile, export_begin, export_done, export_scratch, scratch_unwanted
from controlplane.states import WorkKind
from rl_core.types import WeightFormat
from workers.base import Attempt, store, unit_task
from workers.weights import target_of

log = structlog.get_logger(__name__)

PART_BYTES: Final = 16 * 2**20


@unit_task(WorkKind.EXPORT, limit_s=VERSION_TIME_LIMIT_S)
def export(attempt: Attempt) -> None:
    """One version, materialised from the store, verified against its root, and put into the store file by file.

    The folder is on this machine's disk until its files stand in the store; whatever becomes of this attempt, a later
    one takes a folder that it left whole.
    """
    row = export_begin(attempt.claim)
    for left in scratch_unwanted():
        shutil.rmtree(left, ignore_errors=True)
    if row is None:
        return
    scratch = export_scratch(row)
    folder = scratch / "model"
    if not folder.exists():  # half of one is of no use
        shutil.rmtree(scratch, ignore_errors=True)
    materialise(row.version, folder, WeightFormat(row.format))
    files = [_put(path, attempt) for path in sorted(folder.iterdir())]
    export_done(attempt.claim, export=row, files=files)
    shutil.rmtree(scratch, ignore_errors=True)
    log.info("version_exported", version=str(row.version.ref), format=row.format, files=len(files))


def materialise(version: PolicyVersion, folder: Path, weight_format: WeightFormat = WeightFormat.BF16) -> Path:
    """The version's weights as a model folder at `folder`, from the store alone; a folder that is there is whole.

    Raises: ManifestError, BaseMismatch, DigestMismatch, ObjectMissing, StoreUnavailable; ModelError.
    """
    if folder.exists():
        return folder
    from rl_core.delta.export import export_folder as write
    from rl_core.errors import ModelError

    try:
        write(
            store(),
            target_of(version),
            folder,
            model=Path(version.lineage.model.folder),
            weight_format=weight_format,
            threads=settings.UPDATE_THREADS,
        )
    except ModelError:
        if not folder.exists():  # else another attempt was faster, and wrote the same weights
            raise
    return folder


def _put(path: Path, attempt: Attempt) -> WrittenFile:
    digest, parts = hashlib.sha256(), []
    with path.open("rb") as file:
        while data := file.read(PART_BYTES):
            attempt.check()
            digest.update(data)
            parts.append((blob_put(store(), data), len(data)))
    return WrittenFile(name=path.name, sha256=digest.hexdigest(), parts=parts)
