"""A version's weights in this process, from the store alone and verified against the version's root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.conf import settings

from controlplane.errors import Conflict
from controlplane.models import PolicyVersion
from controlplane.selectors.publications import reading_of
from workers.base import store

if TYPE_CHECKING:
    from rl_core.delta import ShadowWeights, Target


def model_shadow(version: PolicyVersion) -> ShadowWeights:
    """The weights of the version's model, as its folder has them. Raises: ModelError."""
    from rl_core.delta import ShadowWeights

    return ShadowWeights.from_checkpoint(version.lineage.model.folder, threads=settings.UPDATE_THREADS)


def bring_to(shadow: ShadowWeights, version: PolicyVersion) -> None:
    """Move the shadow to the version.

    Raises: Conflict when the version was retired; ManifestError, BaseMismatch, DigestMismatch, ObjectMissing,
    StoreUnavailable.
    """
    from rl_core.delta import reconcile

    if shadow.root != version.root:
        reconcile(store(), shadow, target_of(version), threads=settings.UPDATE_THREADS)


def target_of(version: PolicyVersion) -> Target:
    """Where the version's weights are. Raises: Conflict when nothing leads to them any more."""
    from rl_core.delta import Target

    reading = reading_of(version)
    if reading is None:
        raise Conflict(f"nothing in the store leads to version {version.ref} any more: it is retired")
    return Target(
        version=str(version.ref),
        root=reading.root,
        manifest=reading.manifest,
        snapshot=reading.snapshot or None,
        deltas=reading.deltas,
    )
