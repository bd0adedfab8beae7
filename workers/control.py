"""The control queue: writing a version out as a Hugging Face folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import structlog

from controlplane.models import PolicyVersion
from controlplane.services.versions import export_folder, version_exported
from controlplane.states import WorkKind
from workers.base import Attempt, store, unit_task

log = structlog.get_logger(__name__)


@unit_task(WorkKind.EXPORT)
def export(attempt: Attempt) -> None:
    """One version, materialised from the store and verified against its root."""
    version = PolicyVersion.objects.select_related("parent", "lineage__model").get(pk=attempt.claim.ref)
    folder = export_folder(version)
    materialise(version, folder)
    version_exported(attempt.claim, version=version, folder=str(folder))
    log.info("version_exported", version=str(version.ref), folder=str(folder))


def materialise(version: PolicyVersion, folder: Path) -> Path:
    """The version's weights as a model folder at `folder`, from the store alone; a folder that is there is whole.

    Raises: ManifestError, BaseMismatch, DigestMismatch, ObjectMissing, StoreUnavailable; ModelError.
    """
    if folder.exists():
        return folder
    from rl_core.delta import ShadowWeights, Target, reconcile
    from rl_core.models.checkpoint import write_checkpoint

    model = version.lineage.model
    shadow = ShadowWeights.from_checkpoint(model.folder)
    target = Target(
        version=str(version.ref),
        root=version.root,
        manifest=version.manifest_key,
        snapshot=version.snapshot_key or None,
    )
    reconcile(store(), shadow, target)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as scratch:
        part = Path(scratch) / "model"
        write_checkpoint(part, shadow.tensors, like=Path(model.folder))
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # else another attempt was faster, and wrote the same weights
                raise
            shutil.rmtree(part)
    return folder
