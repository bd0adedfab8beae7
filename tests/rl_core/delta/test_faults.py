"""Damage, kills and full disks: an error that says what to do, and never wrong weights."""

import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from blake3 import blake3
from weightpairs import Lineage, make_weights, replace, same_bits, step
from written_modes import WRITTEN, encode_pieces

from rl_core.delta import (
    Base,
    HopKind,
    ShadowWeights,
    Target,
    publish_delta,
    publish_snapshot,
    read_manifest,
    reconcile,
    weights_root,
)
from rl_core.delta.apply import HopApplication
from rl_core.delta.codec import FrameMode
from rl_core.delta.frames import pieces_of, plan_frames
from rl_core.delta.manifest import encode_manifest
from rl_core.delta.path import Hop
from rl_core.delta.words import words_of
from rl_core.errors import (
    BaseMismatch,
    DigestMismatch,
    ManifestError,
    ObjectExists,
    ObjectMissing,
    StoreUnavailable,
    StoreUnsuitable,
    WeightsError,
)
from rl_core.store import open_store
from rl_core.types import VersionRef


def copy_of(shadow):
    return {name: tensor.clone() for name, tensor in shadow.tensors.items()}


def refused(lineage, shadow, target, error=WeightsError):
    """Reconcile, expect the error, and check that the shadow is untouched and whole."""
    before, root, version = copy_of(shadow), shadow.root, shadow.version
    with pytest.raises(error):
        reconcile(lineage.store, shadow, target)
    assert same_bits(shadow.tensors, before)
    assert (shadow.root, shadow.version, shadow.poisoned) == (root, version, False)


@pytest.mark.parametrize("kind", ["delta", "snapshot"])
def test_a_flipped_byte_anywhere_never_makes_wrong_weights(location, kind):
    lineage = Lineage(location, versions=1, layers=1)
    shadow = lineage.shadow(0) if kind == "delta" else ShadowWeights.from_tensors(make_weights(seed=8, layers=1))
    number = 1 if kind == "delta" else 0
    manifest = read_manifest(lineage.store, lineage.published[number].manifest_key)
    every = (1 if kind == "delta" else 7) if lineage.store.url.startswith("file:") else 101
    for key in [lineage.published[number].manifest_key, *(segment.key for segment in manifest.segments)]:
        data = lineage.store.get(key)
        for at in range(0, len(data), every):
            replace(lineage.store, key, data[:at] + bytes([data[at] ^ (1 << (at % 8))]) + data[at + 1 :])
            refused(lineage, shadow, lineage.target(number), (DigestMismatch, ManifestError))
        replace(lineage.store, key, data)
    reconcile(lineage.store, shadow, lineage.target(number))
    assert same_bits(shadow.tensors, lineage.weights[number])


def test_cut_missing_and_lengthened_segments(location):
    lineage = Lineage(location, versions=1)
    shadow = lineage.shadow(0)
    segment = lineage.segment(1)
    data = lineage.store.get(segment)
    for damaged in (data[:-1], data[:10], b"", data + b"\0"):
        replace(lineage.store, segment, damaged)
        refused(lineage, shadow, lineage.target(1), DigestMismatch)
    replace(lineage.store, segment, None)
    refused(lineage, shadow, lineage.target(1), ObjectMissing)
    replace(lineage.store, segment, data)
    reconcile(lineage.store, shadow, lineage.target(1))
    assert same_bits(shadow.tensors, lineage.weights[1])


def _forge(lineage, number, *, mode=FrameMode.HAZARD):
    """Replace a frame's payload by that of other weights, and make every digest on the way agree with it."""
    manifest = read_manifest(lineage.store, lineage.published[number].manifest_key)
    (frame,), (segment,) = manifest.frames, manifest.segments
    names = [entry.name for entry in manifest.tensors]
    forged = step(lineage.weights[number], seed=1234, lr=1e-2)
    old = pieces_of(frame.ranges, [words_of(lineage.weights[number - 1][name]) for name in names])
    new = pieces_of(frame.ranges, [words_of(forged[name]) for name in names])
    payload = encode_pieces(mode, old, new)
    lied = msgspec.structs.replace(
        manifest,
        reversible=mode.sparse,
        frames=[
            msgspec.structs.replace(
                frame, mode=mode, size=len(payload), xxh3=xxhash.xxh3_64_hexdigest(payload), offset=0
            )
        ],
        segments=[msgspec.structs.replace(segment, size=len(payload), blake3=blake3(payload).hexdigest())],
    )
    replace(lineage.store, segment.key, payload)
    replace(lineage.store, lineage.published[number].manifest_key, encode_manifest(lied))


@pytest.mark.parametrize("mode", WRITTEN)
def test_well_digested_wrong_frames_are_taken_back(location, mode):
    """Every digest agrees, but what comes out is not what the root names: the shadow is restored bit for bit."""
    lineage = Lineage(location, versions=1)
    _forge(lineage, 1, mode=mode)
    shadow = lineage.shadow(0)
    refused(lineage, shadow, lineage.target(1), DigestMismatch)


def test_a_wrong_frame_met_backwards_is_taken_back(location):
    lineage = Lineage(location, versions=1)
    shadow = lineage.shadow(1)
    manifest = read_manifest(lineage.store, lineage.published[1].manifest_key)
    lied = msgspec.structs.replace(manifest, base=msgspec.structs.replace(manifest.base, root="ab" * 32, manifest=None))
    key = "lineages/lin/0-1/9/manifest.json"
    lineage.store.put(key, encode_manifest(lied))
    lineage.store.put("snapshots/old/manifest.json", encode_manifest(lied))
    shadow.manifest_key = key
    strange = Target(version="lin:0-0", root="ab" * 32, manifest="snapshots/none/manifest.json")
    refused(lineage, shadow, strange, DigestMismatch)
    # The frames lead to the true base's root, not to the one that the manifest claims.
    before = copy_of(shadow)
    hop = Hop(kind=HopKind.BACKWARD, manifest_key=key, manifest=lied, leads_to=lied.base)
    payload = memoryview(lineage.store.get(lied.segments[0].key))

    def take() -> None:
        with HopApplication(shadow, hop, threads=1) as application:
            application.apply({0: payload})
            application.commit()

    with pytest.raises(DigestMismatch, match="root"):
        take()
    assert same_bits(shadow.tensors, before)
    assert not shadow.poisoned


@pytest.mark.parametrize("kind", [HopKind.FORWARD, HopKind.BACKWARD])
def test_a_hop_is_not_begun_on_another_base(location, kind):
    """Whoever planned the path: the application itself looks at the base before it writes a word."""
    lineage = Lineage(location, versions=3)
    key = lineage.published[2].manifest_key
    manifest = read_manifest(lineage.store, key)
    hop = Hop(kind=kind, manifest_key=key, manifest=manifest, leads_to=Base("lin:0-2", manifest.root, key))
    shadow = lineage.shadow(3)
    with pytest.raises(BaseMismatch, match="Nothing was applied"):
        HopApplication(shadow, hop, threads=1).__enter__()
    assert same_bits(shadow.tensors, lineage.weights[3])
    assert not shadow.poisoned


def test_memory_that_was_written_to_poisons_and_a_snapshot_repairs(location):
    lineage = Lineage(location, versions=2)
    shadow = lineage.shadow(0)
    reconcile(lineage.store, shadow, lineage.target(1))
    shadow.tensors["model.norm.weight"][3] = 7.0  # somebody writes into weights that are not theirs
    with pytest.raises(DigestMismatch, match=r"model\.norm\.weight"):
        reconcile(lineage.store, shadow, lineage.target(2))
    assert shadow.poisoned
    assert shadow.damaged
    result = reconcile(lineage.store, shadow, lineage.target(2))
    assert not shadow.damaged
    assert result.hops[0].kind is HopKind.SNAPSHOT
    assert not shadow.poisoned
    assert same_bits(shadow.tensors, lineage.weights[2])
    assert set(result.changed) == set(lineage.weights[2])  # nothing that the engine holds is known to be right


@pytest.mark.parametrize("lost", ["segment", "damaged segment", "manifest"])
@pytest.mark.parametrize("around", ["snapshot", "skip"])
def test_what_is_lost_is_gone_around(location, lost, around):
    lineage = Lineage(location, versions=2)
    base = Base("lin:0-0", lineage.published[0].root, lineage.published[0].manifest_key)
    skip = publish_delta(
        lineage.store,
        old=lineage.weights[0],
        new=lineage.weights[2],
        version=VersionRef("lin", 0, 2),
        base=base,
        fence=7,
    )
    named = {"snapshot": lineage.snapshot(2)} if around == "snapshot" else {"deltas": (skip.manifest_key,)}
    target = msgspec.structs.replace(lineage.target(2, snapshot=None), **named)
    data = lineage.store.get(lineage.segment(2))
    if lost == "manifest":
        lineage.store.delete(lineage.published[2].manifest_key)
    else:
        replace(lineage.store, lineage.segment(2), data[:-1] if lost == "damaged segment" else None)
    shadow = lineage.shadow(1)  # one delta leads there; a skip is reached backwards
    result = reconcile(lineage.store, shadow, target)
    assert [hop.manifest_key for hop in result.hops][-1] == (named.get("snapshot") or skip.manifest_key)
    assert same_bits(shadow.tensors, lineage.weights[2])


def test_a_hop_too_large_to_be_taken_back_is_made_good_by_a_snapshot(location, monkeypatch):
    """Nobody damaged the memory, so that is not said; until there is a snapshot the shadow is no base of anything."""
    monkeypatch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 1 << 9)
    monkeypatch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=1 << 12))
    monkeypatch.setattr("rl_core.delta.apply.FRAME_BYTES", 0)
    monkeypatch.setattr("rl_core.delta.apply._UNDO_SHARE", 1 << 40)
    lineage = Lineage(location, versions=1)
    segments = read_manifest(lineage.store, lineage.published[1].manifest_key).segments
    assert len(segments) > 1
    replace(lineage.store, segments[-1].key, None)
    shadow = lineage.shadow(0)
    with pytest.raises(ObjectMissing):
        reconcile(lineage.store, shadow, lineage.target(1, snapshot=None))
    assert (shadow.poisoned, shadow.damaged) == (True, False)
    other = lineage.shadow(0)
    for one in (shadow, other):
        result = reconcile(lineage.store, one, lineage.target(1, snapshot=lineage.snapshot(1)))
        assert [hop.kind for hop in result.hops] == [HopKind.SNAPSHOT]
        assert same_bits(one.tensors, lineage.weights[1])
        assert set(result.changed) == set(lineage.weights[1])


def test_frames_beside_one_that_does_not_read_are_taken_back(location, monkeypatch):
    monkeypatch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=1 << 12))
    lineage = Lineage(location, versions=1)
    key = lineage.published[1].manifest_key
    manifest = read_manifest(lineage.store, key)
    shadow = lineage.shadow(0)
    before = copy_of(shadow)
    hop = Hop(kind=HopKind.FORWARD, manifest_key=key, manifest=manifest, leads_to=Base("lin:0-1", manifest.root, key))
    segment = memoryview(lineage.store.get(manifest.segments[0].key))
    payloads = {
        index: segment[frame.offset : frame.offset + frame.size]
        for index, frame in enumerate(manifest.frames)
        if frame.segment == 0
    }
    assert len(payloads) > 2
    payloads[0] = payloads[0][:-3]

    def take() -> None:
        with HopApplication(shadow, hop, threads=1) as application:
            application.apply(payloads)

    with pytest.raises(DigestMismatch):
        take()
    assert same_bits(shadow.tensors, before)
    assert not shadow.poisoned


def test_a_poisoned_shadow_without_a_snapshot_stays_refused(location):
    old = make_weights()
    store = open_store(location)
    shadow = ShadowWeights.from_tensors(old)
    published = publish_delta(
        store,
        old=old,
        new=step(old, seed=1),
        version=VersionRef("lin", 0, 1),
        base=Base("lin:0-0", shadow.root),
        fence=0,
    )
    target = Target(version="lin:0-1", root=published.root, manifest=published.manifest_key)
    shadow.tensors["model.norm.weight"][3] = 7.0
    assert not shadow.recheck()
    for _ in range(2):
        with pytest.raises(BaseMismatch, match="damaged"):
            reconcile(store, shadow, target)
    assert shadow.poisoned


def test_a_failure_up_the_chain_hides_no_change(location):
    """The first hop stands, the second fails: the reconcile that succeeds reports both hops' tensors."""
    lineage = Lineage(location, versions=0)
    one = dict(lineage.weights[0])
    one["model.norm.weight"] = one["model.norm.weight"] + 1
    lineage.publish(one, onto=0)
    two = dict(one)
    two["model.layers.0.input_layernorm.weight"] = two["model.layers.0.input_layernorm.weight"] + 1
    lineage.publish(two, onto=1)
    segment = lineage.segment(2)
    data = lineage.store.get(segment)
    replace(lineage.store, segment, data[:-1])
    shadow = lineage.shadow(0)
    with pytest.raises(DigestMismatch):
        reconcile(lineage.store, shadow, lineage.target(2))
    assert (shadow.version, shadow.poisoned) == ("lin:0-1", False)
    assert same_bits(shadow.tensors, one)
    replace(lineage.store, segment, data)
    result = reconcile(lineage.store, shadow, lineage.target(2))
    assert set(result.changed) == {"model.norm.weight", "model.layers.0.input_layernorm.weight"}


def test_an_interrupt_while_applying_leaves_whole_weights(location, monkeypatch):
    lineage = Lineage(location, versions=1)
    shadow = lineage.shadow(0)
    before = copy_of(shadow)
    monkeypatch.setattr(
        "rl_core.delta.apply.HopApplication.commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        reconcile(lineage.store, shadow, lineage.target(1))
    assert same_bits(shadow.tensors, before)
    assert not shadow.poisoned


def test_a_collected_chain_falls_back_to_the_snapshot(location):
    lineage = Lineage(location, versions=4)
    key = lineage.snapshot(3)
    lineage.store.delete(lineage.published[2].manifest_key)
    shadow = lineage.shadow(0)
    with pytest.raises(BaseMismatch):
        reconcile(lineage.store, shadow, lineage.target(4))
    result = reconcile(lineage.store, shadow, lineage.target(4, snapshot=key))
    assert [hop.kind for hop in result.hops] == [HopKind.SNAPSHOT, HopKind.FORWARD]
    assert same_bits(shadow.tensors, lineage.weights[4])


PUBLISH = textwrap.dedent(
    """
    import os, signal, sys, resource
    sys.path.insert(0, sys.argv[2])
    from weightpairs import make_weights, step
    from rl_core.delta import publish_delta, weights_root, Base
    from rl_core.errors import StoreUnavailable
    from rl_core.store import open_store
    from rl_core.types import VersionRef

    store = open_store(sys.argv[1])
    old = make_weights()
    if sys.argv[3] == "kill":
        put = store.put
        def killed(key, data):
            if key.endswith("manifest.json"):
                os.kill(os.getpid(), signal.SIGKILL)
            put(key, data)
        store.put = killed
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
    try:
        publish_delta(store, old=old, new=step(old, seed=1), version=VersionRef("lin", 0, 1),
                      base=Base("lin:0-0", weights_root(old)), fence=0)
    except StoreUnavailable as error:
        assert "no space left" in str(error), error
        os._exit(42)
    """
)


def _publish_elsewhere(location, how):
    command = [sys.executable, "-c", PUBLISH, str(location), str(Path(__file__).parent), how]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_a_publisher_killed_before_the_manifest(location):
    assert _publish_elsewhere(location, "kill").returncode == -9
    store = open_store(location)
    left = [(info.key, info.modified) for info in store.list()]
    assert [key.rpartition("-")[0] for key, _ in left] == ["lineages/lin/0-1/0/segments/0000"]
    old = make_weights()
    shadow = ShadowWeights.from_tensors(old)
    base = Base("lin:0-0", shadow.root)
    key = "lineages/lin/0-1/0/manifest.json"
    with pytest.raises(ObjectMissing):
        reconcile(store, shadow, Target(version="lin:0-1", root="0" * 64, manifest=key))
    # The same attempt, run again, adopts what it left; one that then comes to other weights is refused.
    new = step(old, seed=1)
    published = publish_delta(store, old=old, new=new, version=VersionRef("lin", 0, 1), base=base, fence=0)
    assert [(info.key, info.modified) for info in store.list() if "segments" in info.key] == left
    with pytest.raises(ObjectExists, match="new fence"):
        publish_delta(store, old=old, new=step(old, seed=2), version=VersionRef("lin", 0, 1), base=base, fence=0)
    reconcile(store, shadow, Target(version="lin:0-1", root=published.root, manifest=published.manifest_key))
    assert same_bits(shadow.tensors, new)


def test_a_store_that_copies_nothing_is_asked_once(location, monkeypatch):
    monkeypatch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 1 << 9)
    monkeypatch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=1 << 12))
    store, old, asked = open_store(location), make_weights(), []

    def refuses(source, key):
        asked.append(source)
        raise StoreUnsuitable("no copies here")

    store.copy = refuses
    base, new = Base("lin:0-0", weights_root(old)), step(old, seed=1)
    for fence in (0, 1):
        made = publish_delta(store, old=old, new=new, version=VersionRef("lin", 0, 1), base=base, fence=fence)
    assert len(read_manifest(store, made.manifest_key).segments) > 1
    assert len(asked) == 1
    shadow = ShadowWeights.from_tensors(old)
    reconcile(store, shadow, Target(version="lin:0-1", root=made.root, manifest=made.manifest_key))
    assert same_bits(shadow.tensors, new)


@pytest.mark.parametrize("how", ["stands", "collected", "damaged"])
def test_an_attempt_after_a_killed_one_sends_what_does_not_stand(location, how):
    assert _publish_elsewhere(location, "kill").returncode == -9
    store = open_store(location)
    (left,) = store.list("lineages")
    sent, put, listed = [], store.put, store.list
    if how == "damaged":
        data = store.get(left.key)
        replace(store, left.key, data[:-1] + bytes([data[-1] ^ 1]))

    def list_and_collect(prefix=""):
        found = list(listed(prefix))
        if how == "collected" and found:
            store.delete(left.key)
        return iter(found)

    store.put = lambda key, data: (sent.append(key), put(key, data))
    store.list = list_and_collect
    old = make_weights()
    new, shadow = step(old, seed=1), ShadowWeights.from_tensors(old)
    base = Base("lin:0-0", shadow.root)
    published = publish_delta(store, old=old, new=new, version=VersionRef("lin", 0, 1), base=base, fence=1)
    (segment,) = read_manifest(store, published.manifest_key).segments
    assert segment.key == left.key.replace("/0/segments/", "/1/segments/")
    assert sent == [*([] if how == "stands" else [segment.key]), published.manifest_key]
    assert (published.upload_s > 0) == (how != "stands")
    if how == "stands":
        store.delete(left.key)  # an earlier attempt's are garbage
    reconcile(store, shadow, Target(version="lin:0-1", root=published.root, manifest=published.manifest_key))
    assert same_bits(shadow.tensors, new)


def test_no_space_left_while_publishing(tmp_path):
    done = _publish_elsewhere(tmp_path, "full")
    assert done.returncode == 42, done.stderr
    assert not any(path.name == "manifest.json" for path in tmp_path.rglob("*"))


def test_a_snapshot_that_fails_half_way_leaves_the_shadow_alone(location, monkeypatch):
    monkeypatch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 1 << 18)
    store = open_store(location)
    weights = {f"w{i}": torch.randn(3_000_000).bfloat16() for i in range(2)}
    published = publish_snapshot(store, weights, key_prefix="snapshots/a", version=VersionRef("lin", 0, 0))
    segments = read_manifest(store, published.manifest_key).segments
    assert len(segments) > 1
    target = Target(version="lin:0-0", root=published.root, manifest=published.manifest_key)
    shadow = ShadowWeights.from_tensors(make_weights(seed=2))
    before = copy_of(shadow)
    store.delete(segments[-1].key)
    with pytest.raises(ObjectMissing):
        reconcile(store, shadow, target)
    assert same_bits(shadow.tensors, before)
    assert not shadow.poisoned


def test_a_store_that_goes_away_is_retryable(tmp_path):
    lineage = Lineage(tmp_path / "store", versions=1)
    shadow = lineage.shadow(0)
    segment = tmp_path / "store" / read_manifest(lineage.store, lineage.published[1].manifest_key).segments[0].key
    segment.unlink()
    segment.symlink_to(segment)  # reading a loop fails in a way that is neither missing nor damaged
    with pytest.raises(StoreUnavailable) as caught:
        reconcile(lineage.store, shadow, lineage.target(1))
    assert caught.value.retryable
    assert not shadow.poisoned
