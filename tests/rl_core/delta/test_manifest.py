import msgspec
import pytest
from weightpairs import Lineage

from rl_core.delta import read_manifest
from rl_core.delta.manifest import Base, TensorRange, decode_manifest, encode_manifest
from rl_core.errors import ManifestError


@pytest.fixture
def manifest(tmp_path):
    lineage = Lineage(tmp_path, versions=1, layers=1)
    return read_manifest(lineage.store, lineage.published[1].manifest_key)


def test_a_manifest_reads_back_as_it_was_written(manifest):
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.reversible
    assert [entry.name for entry in manifest.tensors] == sorted(entry.name for entry in manifest.tensors)


def test_a_flipped_bit_anywhere_is_noticed(manifest):
    data = encode_manifest(manifest)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(ManifestError):
            decode_manifest(bytes(damaged))


def test_other_spellings_of_the_same_content_are_refused(manifest):
    data = encode_manifest(manifest)
    for other in (b" " + data, data.replace(b",", b", ", 1), data + b"\n", data[:-1], b"", b"null", b"[" * 5000):
        with pytest.raises(ManifestError):
            decode_manifest(other)


def test_an_unknown_format_is_named(manifest):
    later = encode_manifest(msgspec.structs.replace(manifest, format=3))
    with pytest.raises(ManifestError, match=r"format 3 is not known.*upgrade"):
        decode_manifest(later)
    strange = msgspec.json.encode({"format": 9, "entirely": "different"})
    with pytest.raises(ManifestError, match="format 9"):
        decode_manifest(strange)


def _frames(manifest, **changes):
    first = msgspec.structs.replace(manifest.frames[0], **changes)
    return msgspec.structs.replace(manifest, frames=[first, *manifest.frames[1:]])


LIES = {
    "codec": lambda m: msgspec.structs.replace(m, codec="frames/9"),
    "version": lambda m: msgspec.structs.replace(m, version="no version"),
    "root": lambda m: msgspec.structs.replace(m, root="0" * 64),
    "base missing": lambda m: msgspec.structs.replace(m, base=None),
    "base root": lambda m: msgspec.structs.replace(m, base=Base(m.version, "zz")),
    "base key": lambda m: msgspec.structs.replace(m, base=Base(m.version, "0" * 64, "../../etc/passwd")),
    "bytes": lambda m: msgspec.structs.replace(m, full_bytes=1),
    "table order": lambda m: msgspec.structs.replace(m, tensors=m.tensors[::-1]),
    "dtype": lambda m: msgspec.structs.replace(
        m, tensors=[msgspec.structs.replace(m.tensors[0], dtype="X9"), *m.tensors[1:]]
    ),
    "segment key": lambda m: msgspec.structs.replace(m, segments=[msgspec.structs.replace(m.segments[0], key="/abs")]),
    "segment digest": lambda m: msgspec.structs.replace(
        m, segments=[msgspec.structs.replace(m.segments[0], blake3="no")]
    ),
    "segment size": lambda m: msgspec.structs.replace(
        m, segments=[msgspec.structs.replace(m.segments[0], size=(64 << 20) + 1)]
    ),
    "no such segment": lambda m: _frames(m, segment=5),
    "beyond the segment": lambda m: _frames(m, offset=10**9),
    "no such tensor": lambda m: _frames(m, ranges=[TensorRange(10**6, 0, 1)]),
    "beyond the tensor": lambda m: _frames(m, ranges=[TensorRange(0, 0, 10**9)]),
    "negative start": lambda m: _frames(m, ranges=[TensorRange(0, -1, 2)]),
    "overlap": lambda m: _frames(m, ranges=[TensorRange(0, 0, 2), TensorRange(0, 1, 2)]),
    "raw but reversible": lambda m: _frames(m, mode="raw"),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_well_sealed_lie_is_refused(manifest, lie):
    """The digest only proves that a manifest is whole; what it says must also hold together."""
    with pytest.raises(ManifestError):
        decode_manifest(encode_manifest(LIES[lie](manifest)))


def test_a_frame_of_more_weights_than_are_decoded_at_once_is_refused(manifest, monkeypatch):
    monkeypatch.setattr("rl_core.delta.manifest.FRAME_BYTES", 16)
    with pytest.raises(ManifestError, match="a frame holds more than 16 bytes"):
        decode_manifest(encode_manifest(manifest))


def test_a_manifest_may_be_only_so_long(manifest, monkeypatch):
    monkeypatch.setattr("rl_core.delta.manifest._MAX_MANIFEST_BYTES", 100)
    for data in (encode_manifest(manifest), b"[" * 101):
        with pytest.raises(ManifestError, match="longer than"):
            decode_manifest(data)


def test_a_snapshot_must_hold_every_element(tmp_path):
    lineage = Lineage(tmp_path, versions=0, layers=1)
    snapshot = read_manifest(lineage.store, lineage.published[0].manifest_key)
    with pytest.raises(ManifestError, match="every element"):
        decode_manifest(encode_manifest(msgspec.structs.replace(snapshot, frames=snapshot.frames[1:])))


def test_unsafe_keys_are_refused(tmp_path):
    lineage = Lineage(tmp_path, versions=0)
    with pytest.raises(ManifestError, match="unsafe key"):
        read_manifest(lineage.store, "../secrets.json")
