"""Publications made from published versions: skip-deltas, snapshots and serving formats, on the control queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from controlplane.celery import VERSION_TIME_LIMIT_S
from controlplane.errors import Conflict
from controlplane.models import PolicyVersion, Publication
from controlplane.selectors.publications import reading_of
from controlplane.services.derivations import Derived, derivation_begin, derivation_done, derivation_prefix
from controlplane.states import PublicationKind, WorkKind
from rl_core.types import WeightFormat
from workers.base import Attempt, store, unit_task
from workers.weights import bring_to, model_shadow

if TYPE_CHECKING:
    from rl_core.delta import Base, Published

log = structlog.get_logger(__name__)


@unit_task(WorkKind.DERIVE, limit_s=VERSION_TIME_LIMIT_S)
def derive(attempt: Attempt) -> None:
    """One publication, while the trainer goes on. In memory are the model's weights, and the base's in the format."""
    row = derivation_begin(attempt.claim)
    if row is None:
        return
    prefix = derivation_prefix(row, fence=attempt.claim.fence)
    base_root, made = _publish(row, prefix=prefix, fence=attempt.claim.fence)
    attempt.check()
    derivation_done(
        attempt.claim,
        publication=row,
        derived=Derived(
            root=made.root,
            base_root=base_root,
            manifest_key=made.manifest_key,
            bytes=made.bytes,
            full_bytes=made.full_bytes,
        ),
    )
    log.info("publication_derived", kind=row.kind, format=row.format, version=str(row.version.ref), bytes=made.bytes)


def _publish(row: Publication, *, prefix: str, fence: int) -> tuple[str, Published]:
    """Publish under `prefix`; the base's root, and what was made. Raises: as `bring_to`, and what publishing does."""
    from rl_core.delta import publish_delta, publish_snapshot
    from rl_core.formats import serving_copy, serving_weights_of
    from rl_core.memory import give_blocks_back

    give_blocks_back()
    version, weight_format = row.version, WeightFormat(row.format)
    shadow = model_shadow(version)
    if row.kind == PublicationKind.SNAPSHOT or row.base_version is None:
        bring_to(shadow, version)
        new = serving_weights_of(shadow.tensors, weight_format)
        return "", publish_snapshot(store(), new, key_prefix=prefix, version=version.ref, fence=fence)
    bring_to(shadow, row.base_version)
    old = serving_copy(shadow.tensors, weight_format)
    bring_to(shadow, version)
    base = _base(row.base_version, weight_format)
    made = publish_delta(
        store(),
        old=old,
        new=serving_weights_of(shadow.tensors, weight_format),
        version=version.ref,
        base=base,
        fence=fence,
        key_prefix=prefix,
    )
    return base.root, made


def _base(version: PolicyVersion, weight_format: WeightFormat) -> Base:
    from rl_core.delta import Base

    reading = reading_of(version, weight_format)
    if reading is None:
        raise Conflict(f"nothing in the store leads to version {version.ref} in {weight_format} any more")
    return Base(str(version.ref), reading.root, reading.manifest)
