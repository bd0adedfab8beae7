"""Version 0 of a lineage under its own name: the weights of a model or of a parent, described once more."""

from __future__ import annotations

import msgspec

from controlplane.models import PolicyVersion
from rl_core.store import ObjectStore


def manifest_ensure(store: ObjectStore, version: PolicyVersion) -> None:
    """Write the manifest of a version 0 if it is not there: the source's, with this version's name. Idempotent.

    The segments it names are the source's own; nothing is copied. Other versions' manifests stand since they were
    published. Raises: ObjectMissing when the source's manifest is gone.
    """
    if version.number != 0 or version.epoch != 0 or store.exists(version.manifest_key):
        return
    from rl_core.delta.manifest import encode_manifest, read_manifest

    if version.parent is not None:
        manifest_ensure(store, version.parent)
        source = version.parent.manifest_key
    else:
        source = version.lineage.model.manifest_key
    manifest = msgspec.structs.replace(read_manifest(store, source), version=str(version.ref), fence=0)
    store.put_or_adopt(version.manifest_key, encode_manifest(manifest))
