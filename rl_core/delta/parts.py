"""Versions that several processes publish, each the tensors that it holds: no step needs the whole model in one place.

Each process calls `publish_delta` (or `publish_snapshot`) with its own tensors and its number as `part`: its segments
lie under the version's prefix, and a manifest of them beside it. Then one process, which needs no weights, merges these
into the version's manifest; until it stands, nothing is published. All of it may be killed and run again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from rl_core.delta.manifest import (
    Base,
    Frame,
    Manifest,
    ManifestKind,
    Segment,
    TensorEntry,
    TensorRange,
    manifest_key,
    part_prefix,
    read_manifest,
    version_prefix,
)
from rl_core.delta.publisher import Published, commit
from rl_core.delta.root import root_of_leaves
from rl_core.errors import BaseMismatch, ManifestError, ObjectExists
from rl_core.store import ObjectStore
from rl_core.types import VersionRef


def merge_parts(
    store: ObjectStore,
    *,
    parts: int,
    version: VersionRef,
    base: Base | None,
    fence: int,
    base_leaves: Mapping[str, str] | None = None,
    key_prefix: str | None = None,
) -> Published:
    """Publish a version whose `parts` stand, numbered from 0. No `base`: they are a snapshot's.

    `base_leaves` are the base's, by tensor (its manifest's table, or `weights_leaves`). A part's own base is those of
    its tensors that the base has, and is named by their root: a part that was made from others is found by it.
    Raises: ObjectMissing for a part that is not there; BaseMismatch; ManifestError for parts of something else, of more
    processes, of other builds, or with tensors in common; ObjectExists when other content stands under this fence;
    StoreUnavailable.
    """
    started = time.perf_counter()
    prefix = key_prefix or version_prefix(version, fence=fence)
    if parts < 1 or store.exists(manifest_key(part_prefix(prefix, parts))):
        raise ManifestError(f"{prefix} has other parts than {parts}; merge as many as were published")
    found = [read_manifest(store, manifest_key(part_prefix(prefix, number))) for number in range(parts)]
    kind = ManifestKind.SNAPSHOT if base is None else ManifestKind.DELTA
    if any((part.version, part.fence, part.kind) != (str(version), fence, kind) for part in found):
        raise ManifestError(f"a part under {prefix} is not of this {kind} of {version}; publish it under a new fence")
    if base is not None:
        _check_base(found, base, base_leaves or {})
    if len({part.codec for part in found}) > 1:
        raise ManifestError(f"the parts under {prefix} are of different builds; publish them again with one")
    manifest = _merged(found, base=base, before=set(base_leaves or ()))
    try:
        return commit(store, manifest_key(prefix), manifest, started=started)
    except ObjectExists as error:
        raise ObjectExists(f"{prefix} has another manifest; publish under a new fence or open a new epoch") from error


def _check_base(parts: Sequence[Manifest], base: Base, leaves: Mapping[str, str]) -> None:
    if root_of_leaves(leaves) != base.root:
        raise BaseMismatch(f"the leaves that were given are not those of {base.version}; take its manifest's")
    for number, part in enumerate(parts):
        held = {entry.name: leaves[entry.name] for entry in part.tensors if entry.name in leaves}
        if part.base is None or part.base.root != root_of_leaves(held):
            raise BaseMismatch(f"part {number} was not made from its tensors of {base.version}; publish it again")


def _merged(parts: Sequence[Manifest], *, base: Base | None, before: set[str]) -> Manifest:
    entries = sorted((entry for part in parts for entry in part.tensors), key=lambda entry: entry.name)
    numbers = {entry.name: number for number, entry in enumerate(entries)}
    if len(numbers) != len(entries):
        raise ManifestError("two parts hold the same tensor; publish each tensor in one")
    frames: list[Frame] = []
    segments: list[Segment] = []
    for part in parts:
        frames.extend(_moved(frame, part.tensors, numbers, after=len(segments)) for frame in part.frames)
        segments.extend(part.segments)
    return Manifest(
        codec=parts[0].codec,
        version=parts[0].version,
        fence=parts[0].fence,
        kind=parts[0].kind,
        base=base,
        root=root_of_leaves({entry.name: entry.leaf for entry in entries}),
        reversible=all(part.reversible for part in parts) and before <= set(numbers),
        full_bytes=sum(part.full_bytes for part in parts),
        changed_elements=sum(part.changed_elements for part in parts),
        elements=sum(part.elements for part in parts),
        tensors=entries,
        frames=frames,
        segments=segments,
    )


def _moved(frame: Frame, table: Sequence[TensorEntry], numbers: Mapping[str, int], *, after: int) -> Frame:
    """A part's frame as one of the whole, whose segments come after so many others."""
    ranges = [TensorRange(numbers[table[piece.tensor].name], piece.start, piece.count) for piece in frame.ranges]
    return msgspec.structs.replace(frame, ranges=ranges, segment=frame.segment + after)
