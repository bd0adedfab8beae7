"""Publishing weights: encode frames, upload segments while encoding goes on, the manifest last.

Everything is created create-only under a prefix that carries the attempt's fence. Until its manifest stands, a
publication does not exist; what a killed publisher leaves behind is garbage that the same attempt may adopt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import msgspec
import structlog
import xxhash
from blake3 import blake3

from rl_core.delta.codec import EncodedFrame, FrameMode, encode_frame
from rl_core.delta.frames import pieces_of, plan_frames
from rl_core.delta.manifest import (
    Base,
    Frame,
    Manifest,
    ManifestKind,
    Segment,
    TensorEntry,
    TensorRange,
    encode_manifest,
    manifest_key,
    read_manifest,
    segment_key,
    version_prefix,
)
from rl_core.delta.root import root_of_leaves, weights_leaves
from rl_core.delta.words import Tensors, dtype_tag, total_bytes, words_of
from rl_core.errors import BaseMismatch, ObjectExists, ObjectMissing
from rl_core.store import ObjectStore
from rl_core.types import VersionRef

SEGMENT_BYTES: Final = 16 << 20  # a segment is closed once it holds this much; it ends below 64 MiB

_log = structlog.get_logger(__name__)
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A version that stands in the store. `bytes` counts segments and manifest; `full_bytes` is the plain weights.

    `adopted`: an earlier publication under the same fence was found complete and taken over.
    """

    manifest_key: str
    root: str
    bytes: int
    full_bytes: int
    changed_elements: int
    elements: int
    seconds: float
    reversible: bool
    adopted: bool = False


@dataclass(frozen=True)
class _Job:
    """What is to be published where."""

    prefix: str
    version: VersionRef
    fence: int
    base: Base | None
    old: Tensors
    new: Tensors
    leaves: dict[str, str]
    threads: int

    @property
    def kind(self) -> ManifestKind:
        return ManifestKind.SNAPSHOT if self.base is None else ManifestKind.DELTA


def publish_snapshot(
    store: ObjectStore, tensors: Tensors, *, key_prefix: str, version: VersionRef, fence: int = 0, threads: int = 1
) -> Published:
    """Publish whole weights under `<key_prefix>/{manifest.json,segments/NNNN}`.

    Raises: ObjectExists when other content stands under the prefix; StoreUnavailable; ModelError for tensors that
    cannot be shipped.
    """
    started = time.perf_counter()
    tensors = _contiguous(tensors)
    leaves = weights_leaves(tensors, threads=threads)
    job = _Job(key_prefix, version, fence, None, {}, tensors, leaves, threads)
    return _publish(store, job, started=started)


def publish_delta(
    store: ObjectStore,
    *,
    old: Tensors,
    new: Tensors,
    version: VersionRef,
    base: Base,
    fence: int,
    threads: int = 1,
    verify_base: bool = True,
) -> Published:
    """Publish `new` as a difference from `old` under `lineages/<id>/<epoch>-<number>/<fence>/`.

    `old` must be the weights that `base` names: its root is computed and compared unless `verify_base` is False (for
    a caller that has just done it). Neither mapping is changed.
    Raises: BaseMismatch; ObjectExists when other content stands under this fence; StoreUnavailable; ModelError.
    """
    started = time.perf_counter()
    old, new = _contiguous(old), _contiguous(new)
    if verify_base:
        root = root_of_leaves(weights_leaves(old, threads=threads))
        if root != base.root:
            raise BaseMismatch(
                f"the weights to encode against have root {root[:16]}…, not {base.root[:16]}… of {base.version}; "
                "encode against the last published weights, or publish a snapshot"
            )
    leaves = weights_leaves(new, threads=threads)
    job = _Job(version_prefix(version, fence=fence), version, fence, base, old, new, leaves, threads)
    return _publish(store, job, started=started)


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}


def _publish(store: ObjectStore, job: _Job, *, started: float) -> Published:
    adopted = _standing(store, job, started=started)
    if adopted is not None:
        return adopted
    manifest = _upload(store, job)
    data = encode_manifest(manifest)
    created = store.put_or_adopt(manifest_key(job.prefix), data)
    published = _published(job, manifest, manifest_bytes=len(data), started=started, adopted=not created)
    _log.info(
        "weights_published",
        version=manifest.version,
        kind=str(manifest.kind),
        bytes=published.bytes,
        full_bytes=published.full_bytes,
        changed_elements=published.changed_elements,
        seconds=round(published.seconds, 3),
    )
    return published


def _standing(store: ObjectStore, job: _Job, *, started: float) -> Published | None:
    """The publication that stands under this fence, if it says the same. Raises: ObjectExists if it does not."""
    key = manifest_key(job.prefix)
    try:
        size = store.head(key).size_bytes
    except ObjectMissing:
        return None
    manifest = read_manifest(store, key)
    same = (manifest.version, manifest.fence, manifest.kind, manifest.base, manifest.root) == (
        str(job.version),
        job.fence,
        job.kind,
        job.base,
        root_of_leaves(job.leaves),
    )
    whole = same and all(store.head(segment.key).size_bytes == segment.size for segment in manifest.segments)
    if not whole:
        raise ObjectExists(f"{key} stands with other content; publish under a new fence or open a new epoch")
    return _published(job, manifest, manifest_bytes=size, started=started, adopted=True)


def _published(job: _Job, manifest: Manifest, *, manifest_bytes: int, started: float, adopted: bool) -> Published:
    return Published(
        manifest_key=manifest_key(job.prefix),
        root=manifest.root,
        bytes=manifest.stored_bytes + manifest_bytes,
        full_bytes=manifest.full_bytes,
        changed_elements=manifest.changed_elements,
        elements=manifest.elements,
        seconds=time.perf_counter() - started,
        reversible=manifest.reversible,
        adopted=adopted,
    )


def _patchable(job: _Job, name: str) -> bool:
    """Whether the receiver holds a tensor of this name, dtype and shape."""
    old, new = job.old.get(name), job.new[name]
    return old is not None and old.dtype == new.dtype and old.shape == new.shape


def _upload(store: ObjectStore, job: _Job) -> Manifest:
    table = [
        TensorEntry(name, dtype_tag(tensor), list(tensor.shape), job.leaves[name]) for name, tensor in job.new.items()
    ]
    names = [entry.name for entry in table]
    patchable = {name for name in names if _patchable(job, name)}
    plan = plan_frames(
        (index, f"{entry.dtype}/{entry.name in patchable}", entry.numel, job.new[entry.name].element_size())
        for index, entry in enumerate(table)
    )

    new_words = [words_of(job.new[name]) for name in names]
    old_words = [words_of(job.old[name]) if name in patchable else new_words[i] for i, name in enumerate(names)]

    def encode(ranges: list[TensorRange]) -> EncodedFrame:
        old = pieces_of(ranges, old_words) if names[ranges[0].tensor] in patchable else None
        return encode_frame(old=old, new=pieces_of(ranges, new_words))

    writer = _SegmentWriter(store, job.prefix)
    frames: list[Frame] = []
    with ThreadPoolExecutor(job.threads) as pool, ThreadPoolExecutor(1) as uploader:
        for ranges, encoded in zip(plan, _mapped(pool, encode, plan, ahead=2 * job.threads), strict=True):
            if encoded.mode is FrameMode.RAW or encoded.changes:
                frames.append(writer.append(ranges, encoded, uploader=uploader))
        segments = writer.finish(uploader=uploader)
    return Manifest(
        version=str(job.version),
        fence=job.fence,
        kind=job.kind,
        base=job.base,
        root=root_of_leaves(job.leaves),
        reversible=job.base is not None
        and set(job.old) == set(names) == patchable
        and all(frame.mode is FrameMode.GAP_ULP for frame in frames),
        full_bytes=total_bytes(job.new),
        changed_elements=sum(frame.changes for frame in frames),
        elements=sum(entry.numel for entry in table),
        tensors=table,
        frames=frames,
        segments=segments,
    )


def _mapped(
    pool: ThreadPoolExecutor, function: Callable[[_In], _Out], items: Iterable[_In], *, ahead: int
) -> Iterator[_Out]:
    """`pool.map` with at most `ahead` results waiting, so that a large model never lies encoded in memory."""
    rest = iter(items)
    waiting = [pool.submit(function, item) for item in islice(rest, ahead)]
    while waiting:
        yield waiting.pop(0).result()
        waiting.extend(pool.submit(function, item) for item in islice(rest, 1))


class _SegmentWriter:
    """Packs payloads end to end; a full segment goes up in the background, one at a time."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._buffer = bytearray()
        self._pending: Future[bool] | None = None
        self._segments: list[Segment] = []

    def append(self, ranges: list[TensorRange], encoded: EncodedFrame, *, uploader: ThreadPoolExecutor) -> Frame:
        frame = Frame(
            ranges=ranges,
            mode=encoded.mode,
            segment=len(self._segments),
            offset=len(self._buffer),
            size=len(encoded.payload),
            xxh3=xxhash.xxh3_64_hexdigest(encoded.payload),
            changes=encoded.changes,
        )
        self._buffer += encoded.payload
        if len(self._buffer) >= SEGMENT_BYTES:
            self._close(uploader)
        return frame

    def _close(self, uploader: ThreadPoolExecutor) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        key = segment_key(self._prefix, len(self._segments))
        self._segments.append(Segment(key, len(data), blake3(data).hexdigest()))
        if self._pending is not None:
            self._pending.result()
        self._pending = uploader.submit(self._put, key, data)

    def _put(self, key: str, data: bytes) -> bool:
        try:
            return self._store.put_or_adopt(key, data)
        except ObjectExists as error:
            raise ObjectExists(f"{key} holds other content; publish under a new fence or open a new epoch") from error

    def finish(self, *, uploader: ThreadPoolExecutor) -> list[Segment]:
        if self._buffer:
            self._close(uploader)
        if self._pending is not None:
            self._pending.result()
        return self._segments
