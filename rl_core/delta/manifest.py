"""Manifests: what a version's weights are, and where the bytes lie that make them. Formats 1 and 2.

A manifest is canonical JSON, since format 2 under zstd: one text per content, closed by a digest over all of it, so
that a damaged manifest is never read as another one. A digest proves consistency, not origin: a replica takes the key
of a manifest from the control plane alone.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec
import zstandard
from blake3 import blake3

from rl_core.delta.codec import CODEC_VERSION, KNOWN_CODECS, FrameMode
from rl_core.delta.root import root_of_leaves
from rl_core.delta.words import DTYPES, Tensors, dtype_tag, numel
from rl_core.errors import ManifestError, SpecError
from rl_core.store import ObjectStore, check_key
from rl_core.types import VersionRef

FORMAT: Final = 2
_KNOWN_FORMATS: Final = frozenset((1, FORMAT))
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_ZSTD_LEVEL: Final = 9
_TRAILER: Final = struct.Struct("<II32s")  # a frame that zstd skips: its magic, its length, blake3 of what is before it
_SKIPPABLE: Final = 0x184D2A50
_HEX64: Final = re.compile(r"[0-9a-f]{64}")
_HEX16: Final = re.compile(r"[0-9a-f]{16}")
_MAX_MANIFEST_BYTES: Final = 1 << 30
FRAME_BYTES: Final = 8 << 20  # of raw weights, at most
MAX_SEGMENT_BYTES: Final = 64 << 20  # of a stored object, at most


class ManifestKind(StrEnum):
    """What the segments hold."""

    SNAPSHOT = "snapshot"  # every tensor whole; needs no base
    DELTA = "delta"  # the difference from the base


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights a delta was made from. `manifest` is None where none was published (an initial checkpoint)."""

    version: str
    root: str
    manifest: str | None = None


class TensorRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Elements `[start, start + count)` of tensor number `tensor` of the table."""

    tensor: int
    start: int
    count: int


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One frame: whose elements it holds, how, and where its payload lies. `xxh3` is of the payload, 16 hex digits."""

    ranges: list[TensorRange]
    mode: FrameMode
    segment: int
    offset: int
    size: int
    xxh3: str
    changes: int

    @property
    def count(self) -> int:
        """Elements covered."""
        return sum(piece.count for piece in self.ranges)


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stored object of payloads, end to end. `blake3` is of all its bytes, 64 hex digits."""

    key: str
    size: int
    blake3: str


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of the new weights, named as in the Hugging Face checkpoint; `leaf` as in `root.leaf_hash`."""

    name: str
    dtype: str
    shape: list[int]
    leaf: str

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return numel(self.shape)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version's weights. Frames without changes are left out of a delta; the table is sorted by name.

    `reversible`: the delta also applies backwards (same tensors, sparse frames only). `full_bytes` is what the whole
    weights would cost, uncompressed.
    """

    format: int = FORMAT
    codec: str = CODEC_VERSION
    version: str
    fence: int
    kind: ManifestKind
    base: Base | None
    root: str
    reversible: bool
    full_bytes: int
    changed_elements: int
    elements: int
    tensors: list[TensorEntry]
    frames: list[Frame]
    segments: list[Segment]
    digest: str = ""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)


class Draft(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is known of a delta before all of it is: the root it is made from, its codec, and `forms_digest` of it."""

    base_root: str
    codec: str
    forms: str


class StandingSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A segment that stands while its version is being published, and the manifest's frames that lie in it.

    Without `draft` or frames it can be fetched before the commit, and not be decoded.
    """

    segment: Segment
    frames: list[Frame] = []
    draft: Draft | None = None


def forms_digest(tensors: Tensors) -> str:
    """Names, dtypes and shapes of weights in one digest, 64 hex digits. Raises: ModelError."""
    forms = [[name, dtype_tag(tensors[name]), list(tensors[name].shape)] for name in sorted(tensors)]
    return str(blake3(msgspec.json.encode(forms)).hexdigest())


def version_prefix(version: VersionRef, *, fence: int) -> str:
    """Where an attempt publishes a version: `lineages/<id>/<epoch>-<number>/<fence>`."""
    return f"lineages/{version.lineage}/{version.epoch}-{version.number}/{fence}"


def manifest_key(prefix: str) -> str:
    """The manifest's key under a publishing prefix."""
    return check_key(f"{prefix}/manifest.json")


def part_prefix(prefix: str, part: int) -> str:
    """Where the manifest of a part lies, numbered from 0, of a version that several processes publish."""
    return f"{prefix}/parts/{part}"


def segment_key(prefix: str, index: int, *, digest: str) -> str:
    """A segment's key under a publishing prefix: named by content, so that one that stands is known for what it is."""
    return check_key(f"{prefix}/segments/{index:04d}-{digest[:32]}")


def _canonical(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="sorted")


def encode_manifest(manifest: Manifest) -> bytes:
    """The text with its digest filled in, compressed, since the table is much of a sparse delta; `zstd -dc` shows it.

    A digest of the compressed bytes follows: some bits of a zstd header may flip and leave the text as it is.
    """
    data = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(_closed(manifest))
    return data + _TRAILER.pack(_SKIPPABLE, 32, blake3(data).digest())


def _closed(manifest: Manifest) -> bytes:
    open_manifest = msgspec.structs.replace(manifest, digest="")
    digest = blake3(_canonical(open_manifest)).hexdigest()
    return _canonical(msgspec.structs.replace(manifest, digest=digest))


def _text(data: bytes) -> bytes:
    """The JSON of a stored manifest. Raises: ManifestError."""
    if len(data) > _MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest is longer than {_MAX_MANIFEST_BYTES} bytes; publish it anew")
    if not data.startswith(_ZSTD_MAGIC):
        return data
    body, trailer = data[: -_TRAILER.size], data[-_TRAILER.size :]
    if trailer != _TRAILER.pack(_SKIPPABLE, 32, blake3(body).digest()):
        raise ManifestError("a manifest does not match its own digest: it is damaged; fetch it again")
    try:
        if zstandard.frame_content_size(body) > _MAX_MANIFEST_BYTES:
            raise ManifestError(f"a manifest says that it is longer than {_MAX_MANIFEST_BYTES} bytes; publish it anew")
        return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ManifestError(f"a manifest does not decompress: {error}; fetch it again") from error


def decode_manifest(data: bytes) -> Manifest:
    """Read and check a manifest. Raises: ManifestError when it is malformed, damaged or of an unknown format."""
    text = _text(data)
    try:
        known = msgspec.json.decode(text, type=_Format).format
        if known not in _KNOWN_FORMATS:
            raise ManifestError(
                f"manifest format {known} is not known to this build (it knows up to {FORMAT}); upgrade Slipway"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"not a manifest: {error}; fetch it again or publish the version anew") from error
    if _closed(manifest) != text:
        raise ManifestError("a manifest does not match its own digest: it is damaged; fetch it again")
    try:
        _check(manifest)
    except SpecError as error:
        raise ManifestError(f"a manifest names what it may not: {error}") from error
    return manifest


def read_manifest(store: ObjectStore, key: str) -> Manifest:
    """Fetch and check a manifest. Raises: ManifestError, ObjectMissing, StoreUnavailable."""
    try:
        check_key(key)
    except SpecError as error:
        raise ManifestError(f"a target or manifest names an unsafe key: {error}") from error
    try:
        return decode_manifest(store.get(key))
    except ManifestError as error:
        raise ManifestError(f"{key}: {error}") from error


class _Format(msgspec.Struct):
    """Read before anything else, so that a later format is named and not reported as malformed."""

    format: int


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ManifestError(f"{message}; publish the version anew")


def _check(manifest: Manifest) -> None:
    VersionRef.parse(manifest.version)
    _require(manifest.codec in KNOWN_CODECS, f"codec {manifest.codec!r} is not known to this build")
    _require(
        (manifest.kind is ManifestKind.DELTA) == (manifest.base is not None), "a delta has a base, a snapshot none"
    )
    if manifest.base is not None:
        VersionRef.parse(manifest.base.version)
        _require(bool(_HEX64.fullmatch(manifest.base.root)), "the base's root is not 64 hex digits")
        if manifest.base.manifest is not None:
            check_key(manifest.base.manifest)
    _check_table(manifest)
    for segment in manifest.segments:
        check_segment(segment)
    for frame in manifest.frames:
        check_frame(frame, manifest, segments=manifest.segments)
    _check_coverage(manifest)


def _check_table(manifest: Manifest) -> None:
    names = [entry.name for entry in manifest.tensors]
    _require(names == sorted(set(names)), "the tensor table is not sorted by distinct names")
    for entry in manifest.tensors:
        _require(entry.dtype in DTYPES, f"tensor {entry.name} has the unknown dtype {entry.dtype}")
        _require(all(size >= 0 for size in entry.shape), f"tensor {entry.name} has a negative size")
        _require(bool(_HEX64.fullmatch(entry.leaf)), f"tensor {entry.name} has a malformed leaf")
    full = sum(entry.numel * DTYPES[entry.dtype].itemsize for entry in manifest.tensors)
    _require(full == manifest.full_bytes <= 1 << 60, "the tensor table does not add up to its bytes")
    leaves = {entry.name: entry.leaf for entry in manifest.tensors}
    _require(root_of_leaves(leaves) == manifest.root, "the root is not the root of the tensor table")


def check_segment(segment: Segment) -> None:
    """Raises: ManifestError, SpecError for an unsafe key."""
    check_key(segment.key)
    sound = 0 < segment.size <= MAX_SEGMENT_BYTES and bool(_HEX64.fullmatch(segment.blake3))
    _require(sound, f"segment {segment.key} is malformed")


def check_frame(frame: Frame, manifest: Manifest, *, segments: Sequence[Segment]) -> None:
    """Whether a frame lies inside its segment and its tensors. Raises: ManifestError."""
    _require(0 <= frame.segment < len(segments), "a frame lies in no segment")
    end = frame.offset + frame.size
    _require(frame.offset >= 0 and frame.size > 0 and end <= segments[frame.segment].size, "a frame leaves it")
    _require(bool(frame.ranges) and bool(_HEX16.fullmatch(frame.xxh3)), "a frame is malformed")
    for piece in frame.ranges:
        _require(0 <= piece.tensor < len(manifest.tensors), "a frame holds a tensor that is not in the table")
        inside = piece.start >= 0 and piece.count > 0
        _require(
            inside and piece.start + piece.count <= manifest.tensors[piece.tensor].numel, "a frame leaves its tensor"
        )
    dtypes = {manifest.tensors[piece.tensor].dtype for piece in frame.ranges}
    _require(len(dtypes) == 1, "a frame mixes dtypes")
    raw = frame.count * max(DTYPES[dtype].itemsize for dtype in dtypes)
    _require(raw <= FRAME_BYTES, f"a frame holds more than {FRAME_BYTES} bytes of weights")
    _require(not manifest.reversible or frame.mode.sparse, "a reversible delta holds a whole frame")
    _require(manifest.base is not None or not frame.mode.sparse, "a snapshot holds a patch")


def _check_coverage(manifest: Manifest) -> None:
    """No element is in two frames; in a snapshot each is in one."""
    pieces = sorted((p.tensor, p.start, p.count) for frame in manifest.frames for p in frame.ranges)
    for (tensor, start, count), (next_tensor, next_start, _) in itertools.pairwise(pieces):
        _require(tensor != next_tensor or start + count <= next_start, "two frames hold the same elements")
    if manifest.kind is ManifestKind.SNAPSHOT:
        covered = sum(count for _, _, count in pieces)
        _require(covered == sum(entry.numel for entry in manifest.tensors), "a snapshot does not hold every element")
