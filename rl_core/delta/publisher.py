"""Publishing weights: frames are encoded, segments go up and tensors are hashed side by side; the manifest comes last.

Everything is created create-only under a prefix that carries the attempt's fence. Until its manifest stands, a
publication does not exist. Segments are named by content: an attempt that is run again after a kill adopts those that
stand, the store copies it those of an attempt before it, and only others are sent. Memory holds two segments, one frame
a thread and one more; of weights on a GPU one tensor a thread, too.
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

from rl_core.delta.codec import CODEC_VERSION, EncodedFrame, Profile
from rl_core.delta.device import device_words, encode_where_they_are
from rl_core.delta.frames import pieces_of, plan_frames
from rl_core.delta.manifest import (
    Base,
    Draft,
    Frame,
    Manifest,
    ManifestKind,
    TensorEntry,
    TensorRange,
    encode_manifest,
    forms_digest,
    manifest_key,
    part_prefix,
    read_manifest,
    version_prefix,
)
from rl_core.delta.root import root_of_leaves, weights_leaves
from rl_core.delta.segments import OnSegment, SegmentWriter
from rl_core.delta.words import Tensors, dtype_tag, total_bytes
from rl_core.errors import BaseMismatch, ObjectExists, ObjectMissing
from rl_core.store import ObjectStore
from rl_core.types import VersionRef

SEGMENT_BYTES: Final = 16 << 20  # a segment is closed once it holds this much; it ends below 64 MiB
_LEAST_SEGMENT_BYTES: Final = 4 << 20
_SEGMENTS: Final = 64  # of models below 1 GiB segments are smaller, so that two of them are little beside the model

_log = structlog.get_logger(__name__)
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A version that stands in the store. `bytes` counts segments and manifest; `full_bytes` is the plain weights.

    `encode_s` is how long encoding alone takes with the threads that it had, `upload_s` how long sending does (0:
    little was sent). `adopted`: an earlier publication under the same fence was found complete and taken over;
    nothing was encoded.
    """

    manifest_key: str
    root: str
    bytes: int
    full_bytes: int
    changed_elements: int
    elements: int
    seconds: float
    encode_s: float
    upload_s: float
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
    threads: int
    profile: Profile = Profile.SMALL
    on_segment: OnSegment | None = None
    on_device: bool | None = None
    part: int | None = None

    @property
    def manifest_key(self) -> str:
        return manifest_key(self.prefix if self.part is None else part_prefix(self.prefix, self.part))

    @property
    def kind(self) -> ManifestKind:
        return ManifestKind.SNAPSHOT if self.base is None else ManifestKind.DELTA


def publish_snapshot(
    store: ObjectStore,
    tensors: Tensors,
    *,
    key_prefix: str,
    version: VersionRef,
    fence: int = 0,
    threads: int = 1,
    part: int | None = None,
) -> Published:
    """Publish whole weights under `<key_prefix>/{manifest.json,segments/…}`; of a `part`, see `parts.merge_parts`.

    Raises: ObjectExists when other content stands under the prefix; StoreUnavailable; ModelError for tensors that
    cannot be shipped.
    """
    started = time.perf_counter()
    job = _Job(key_prefix, version, fence, None, {}, _contiguous(tensors), threads, part=part)
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
    profile: Profile = Profile.SMALL,
    on_segment: OnSegment | None = None,
    on_device: bool | None = None,
    key_prefix: str | None = None,
    part: int | None = None,
) -> Published:
    """Publish `new` as a difference from `old` under `key_prefix`, by default `lineages/<id>/<epoch>-<number>/<fence>`.

    `old` must be the weights that `base` names: its root is computed and compared unless `verify_base` is False (for
    a caller that has just done it). `profile` says what to save: bytes or time. `on_segment` is told of each segment
    once it stands, and of its frames, in order, on a thread of the publisher's. What changed is found where the weights
    are, on a GPU in torch (`on_device` False: in the host's memory; True: in torch on a CPU, too); what is published is
    the same. Weights that a GPU holds come to the host one tensor a thread, to be hashed. Neither mapping is changed.
    With a `part` these are some of the version's tensors: see `parts.merge_parts`.
    Raises: BaseMismatch; ObjectExists when other content stands under this fence; StoreUnavailable; ModelError;
    SpecError where `base` names no version.
    """
    started = time.perf_counter()
    VersionRef.parse(base.version)  # or nobody could read the manifest
    old, new = _contiguous(old), _contiguous(new)
    if verify_base:
        root = root_of_leaves(weights_leaves(old, threads=threads))
        if root != base.root:
            raise BaseMismatch(
                f"the weights to encode against have root {root[:16]}…, not {base.root[:16]}… of {base.version}; "
                "encode against the last published weights, or publish a snapshot"
            )
    prefix = key_prefix or version_prefix(version, fence=fence)
    job = _Job(prefix, version, fence, base, old, new, threads, profile, on_segment, on_device, part)
    return _publish(store, job, started=started)


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensors[name].detach().contiguous() for name in sorted(tensors)}


def _publish(store: ObjectStore, job: _Job, *, started: float) -> Published:
    adopted = _standing(store, job, started=started)
    if adopted is not None:
        return adopted
    with ThreadPoolExecutor(1, thread_name_prefix="leaves") as hasher:
        leaves = hasher.submit(weights_leaves, job.new, threads=job.threads)
        manifest, encode_s, upload_s = _upload(store, job, leaves=leaves)
    return commit(store, job.manifest_key, manifest, started=started, encode_s=encode_s, upload_s=upload_s)


def commit(
    store: ObjectStore, key: str, manifest: Manifest, *, started: float, encode_s: float = 0.0, upload_s: float = 0.0
) -> Published:
    """Write the manifest, whose segments stand; `started` by `time.perf_counter`. Raises: ObjectExists."""
    data = encode_manifest(manifest)
    created = store.put_or_adopt(key, data)
    published = _published(
        key,
        manifest,
        manifest_bytes=len(data),
        started=started,
        encode_s=encode_s,
        upload_s=upload_s,
        adopted=not created,
    )
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
    key = job.manifest_key
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
        root_of_leaves(weights_leaves(job.new, threads=job.threads)),
    )
    whole = same and all(store.head(segment.key).size_bytes == segment.size for segment in manifest.segments)
    if not whole:
        raise ObjectExists(f"{key} stands with other content; publish under a new fence or open a new epoch")
    return _published(key, manifest, manifest_bytes=size, started=started, adopted=True)


def _published(
    key: str,
    manifest: Manifest,
    *,
    manifest_bytes: int,
    started: float,
    encode_s: float = 0.0,
    upload_s: float = 0.0,
    adopted: bool,
) -> Published:
    return Published(
        manifest_key=key,
        root=manifest.root,
        bytes=manifest.stored_bytes + manifest_bytes,
        full_bytes=manifest.full_bytes,
        changed_elements=manifest.changed_elements,
        elements=manifest.elements,
        seconds=time.perf_counter() - started,
        encode_s=encode_s,
        upload_s=upload_s,
        reversible=manifest.reversible,
        adopted=adopted,
    )


def _patchable(job: _Job, name: str) -> bool:
    """Whether the receiver holds a tensor of this name, dtype and shape."""
    old, new = job.old.get(name), job.new[name]
    return old is not None and old.dtype == new.dtype and old.shape == new.shape


def _upload(store: ObjectStore, job: _Job, *, leaves: Future[dict[str, str]]) -> tuple[Manifest, float, float]:
    """The segments, on their way up as they are filled; what the manifest says of them, `encode_s` and `upload_s`."""
    names = list(job.new)
    patchable = {name for name in names if _patchable(job, name)}
    plan = plan_frames(
        (index, f"{dtype_tag(tensor)}/{name in patchable}", tensor.numel(), tensor.element_size())
        for index, (name, tensor) in enumerate(job.new.items())
    )
    new_words = [device_words(job.new[name]) for name in names]
    old_words = [device_words(job.old[name]) if name in patchable else new_words[i] for i, name in enumerate(names)]

    def encode(ranges: list[TensorRange]) -> tuple[EncodedFrame, float]:
        started = time.perf_counter()
        old = pieces_of(ranges, old_words) if names[ranges[0].tensor] in patchable else None
        encoded = encode_where_they_are(old, pieces_of(ranges, new_words), profile=job.profile, on_device=job.on_device)
        return encoded, time.perf_counter() - started

    full_bytes = total_bytes(job.new)
    home, _, attempt = job.prefix.rpartition("/")
    writer = SegmentWriter(
        store,
        job.prefix,
        segment_bytes=min(SEGMENT_BYTES, max(full_bytes // _SEGMENTS, _LEAST_SEGMENT_BYTES)),
        attempts=home if attempt == str(job.fence) else None,
        on_segment=job.on_segment,
        draft=None if job.base is None else Draft(job.base.root, CODEC_VERSION, forms_digest(job.new)),
    )
    frames: list[Frame] = []
    encode_s = 0.0
    with ThreadPoolExecutor(job.threads) as pool, ThreadPoolExecutor(1) as uploader:
        encoding = _mapped(pool, encode, plan, ahead=job.threads + 1)
        for ranges, (encoded, taken_s) in zip(plan, encoding, strict=True):
            encode_s += taken_s / job.threads
            if encoded.changes or not encoded.mode.sparse:
                frames.append(writer.append(ranges, encoded, uploader=uploader))
        segments = writer.finish(uploader=uploader)
    hashed = leaves.result()
    table = [TensorEntry(name, dtype_tag(tensor), list(tensor.shape), hashed[name]) for name, tensor in job.new.items()]
    manifest = Manifest(
        version=str(job.version),
        fence=job.fence,
        kind=job.kind,
        base=job.base,
        root=root_of_leaves(hashed),
        reversible=job.base is not None
        and set(job.old) == set(names) == patchable
        and all(frame.mode.sparse for frame in frames),
        full_bytes=full_bytes,
        changed_elements=sum(frame.changes for frame in frames),
        elements=sum(entry.numel for entry in table),
        tensors=table,
        frames=frames,
        segments=segments,
    )
    return manifest, encode_s, writer.upload_s


def _mapped(
    pool: ThreadPoolExecutor, function: Callable[[_In], _Out], items: Iterable[_In], *, ahead: int
) -> Iterator[_Out]:
    """`pool.map` with at most `ahead` results waiting, so that a large model never lies encoded in memory."""
    rest = iter(items)
    waiting = [pool.submit(function, item) for item in islice(rest, ahead)]
    while waiting:
        yield waiting.pop(0).result()
        waiting.extend(pool.submit(function, item) for item in islice(rest, 1))
