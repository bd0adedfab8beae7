from functools import partial

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from weightpairs import Lineage, make_weights, same_bits, step

from rl_core.delta import (
    Base,
    HopKind,
    ShadowWeights,
    Target,
    plan_path,
    publish_delta,
    publish_snapshot,
    read_manifest,
    reconcile,
    weights_root,
)
from rl_core.delta.frames import plan_frames
from rl_core.delta.manifest import Draft, forms_digest
from rl_core.errors import BaseMismatch, ManifestError, ModelError, ObjectExists, SpecError
from rl_core.store import open_store
from rl_core.types import VersionRef

V0, V1, V2 = (VersionRef("lin", 0, number) for number in range(3))


def kinds(hops):
    return [hop.kind for hop in hops]


def test_chains_forwards_backwards_and_to_where_one_is(location):
    lineage = Lineage(location, versions=5)
    shadow = lineage.shadow(0)
    for number, kind, hops in [
        (3, HopKind.FORWARD, 3),
        (5, HopKind.FORWARD, 2),
        (2, HopKind.BACKWARD, 3),
        (2, HopKind.FORWARD, 0),
        (0, HopKind.BACKWARD, 2),
        (5, HopKind.FORWARD, 5),
    ]:
        result = reconcile(lineage.store, shadow, lineage.target(number))
        assert kinds(result.hops) == [kind] * hops
        assert same_bits(shadow.tensors, lineage.weights[number])
        assert shadow.root == result.root == weights_root(lineage.weights[number])
        assert (shadow.version, shadow.manifest_key) == (f"lin:0-{number}", lineage.published[number].manifest_key)
        assert result.bytes_fetched == sum(hop.bytes for hop in result.hops)
        assert (result.bytes_fetched > 0) == bool(hops)


def test_exactly_the_changed_tensors_are_reported(location):
    lineage = Lineage(location, versions=0)
    new = dict(lineage.weights[0])
    new["model.norm.weight"] = new["model.norm.weight"] + 1
    lineage.publish(new, onto=0)
    shadow = lineage.shadow(0)
    result = reconcile(lineage.store, shadow, lineage.target(1))
    assert list(result.changed) == ["model.norm.weight"]
    assert result.changed["model.norm.weight"] is shadow.tensors["model.norm.weight"]
    assert lineage.published[1].changed_elements == 32


def test_a_branch_is_reached_over_the_common_ancestor(location):
    lineage = Lineage(location, versions=3)
    fork = lineage.publish(step(lineage.weights[1], seed=77), onto=1)
    shadow = lineage.shadow(3)
    result = reconcile(lineage.store, shadow, lineage.target(fork))
    assert kinds(result.hops) == [HopKind.BACKWARD, HopKind.BACKWARD, HopKind.FORWARD]
    assert same_bits(shadow.tensors, lineage.weights[fork])


def test_one_hop_reads_one_manifest(location, monkeypatch):
    lineage = Lineage(location, versions=6)
    read = []
    get = lineage.store.get
    monkeypatch.setattr(lineage.store, "get", lambda key: read.append(key) or get(key))
    plan_path(lineage.store, lineage.shadow(5), lineage.target(6))
    assert read == [lineage.published[6].manifest_key]
    read.clear()
    plan_path(lineage.store, lineage.shadow(6), lineage.target(5))
    assert len(read) <= 3


def test_the_cheapest_path_wins(location):
    lineage = Lineage(location, versions=12)
    key = lineage.snapshot(12)
    near = plan_path(lineage.store, lineage.shadow(11), lineage.target(12, snapshot=key))
    far = plan_path(lineage.store, lineage.shadow(0), lineage.target(12, snapshot=key))
    assert kinds(near) == [HopKind.FORWARD]
    assert kinds(far) == [HopKind.SNAPSHOT]
    assert far[0].bytes < sum(hop.bytes for hop in plan_path(lineage.store, lineage.shadow(0), lineage.target(12)))


def test_a_stranger_falls_back_to_the_nearest_snapshot(location):
    lineage = Lineage(location, versions=4)
    strange = make_weights(seed=9)
    shadow = ShadowWeights.from_tensors(strange)
    result = reconcile(lineage.store, shadow, lineage.target(4))  # the chain ends in the snapshot of 0-0
    assert kinds(result.hops) == [HopKind.SNAPSHOT] + [HopKind.FORWARD] * 4
    assert same_bits(shadow.tensors, lineage.weights[4])
    key = lineage.snapshot(3)
    shadow = ShadowWeights.from_tensors(strange)
    result = reconcile(lineage.store, shadow, lineage.target(4, snapshot=key))
    assert kinds(result.hops) == [HopKind.SNAPSHOT, HopKind.FORWARD]
    assert same_bits(shadow.tensors, lineage.weights[4])


def test_a_snapshot_that_is_gone_is_replaced_by_the_chains_own(location):
    lineage = Lineage(location, versions=2)
    shadow = ShadowWeights.from_tensors(make_weights(seed=9))
    result = reconcile(lineage.store, shadow, lineage.target(2, snapshot="snapshots/collected/manifest.json"))
    assert kinds(result.hops)[0] is HopKind.SNAPSHOT
    assert same_bits(shadow.tensors, lineage.weights[2])


def test_a_base_that_does_not_match_is_refused_never_guessed(location):
    store = open_store(location)
    old = make_weights()
    base = Base(str(V0), weights_root(old))  # an initial checkpoint that nobody published
    published = publish_delta(store, old=old, new=step(old, seed=1), version=V1, base=base, fence=0)
    target = Target(version=str(V1), root=published.root, manifest=published.manifest_key)
    stranger = ShadowWeights.from_tensors(make_weights(seed=5))
    before = {name: tensor.clone() for name, tensor in stranger.tensors.items()}
    with pytest.raises(BaseMismatch, match="publish a snapshot"):
        reconcile(store, stranger, target)
    assert same_bits(stranger.tensors, before)
    assert not stranger.poisoned
    reconcile(store, ShadowWeights.from_tensors(old), target)


def test_the_publisher_refuses_a_base_that_it_does_not_hold(location):
    old, store = make_weights(), open_store(location)
    with pytest.raises(BaseMismatch, match="last published"):
        publish_delta(
            store,
            old=step(old, seed=3),
            new=step(old, seed=1),
            version=V1,
            base=Base(str(V0), weights_root(old)),
            fence=0,
        )
    with pytest.raises(SpecError, match="version"):
        publish_delta(store, old=old, new=old, version=V1, base=Base("nobody's", weights_root(old)), fence=0)
    assert list(store.list()) == []


def test_segments_are_told_of_once_they_stand_and_before_the_manifest(location, monkeypatch):
    monkeypatch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 1 << 10)
    monkeypatch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=1 << 12))
    lineage = Lineage(location, versions=0)
    store, new = lineage.store, step(lineage.weights[0], seed=1, lr=1e-2)
    base = Base("lin:0-0", lineage.published[0].root, lineage.published[0].manifest_key)
    told = []

    def tell(standing):
        assert store.head(standing.segment.key).size_bytes == standing.segment.size
        assert [info.key for info in store.list("lineages") if info.key.endswith("manifest.json")] == []
        told.append(standing)

    arguments = {"old": lineage.weights[0], "new": new, "version": V1, "base": base, "fence": 0, "on_segment": tell}
    published = publish_delta(store, **arguments)
    manifest = read_manifest(store, published.manifest_key)
    assert [one.segment for one in told] == manifest.segments
    assert [frame for one in told for frame in one.frames] == manifest.frames
    assert {one.draft for one in told} == {Draft(base.root, manifest.codec, forms_digest(new))}
    assert [{frame.segment for frame in one.frames} for one in told] == [{n} for n in range(len(told))]
    assert len(told) > 2
    assert published.encode_s > 0
    assert published.upload_s > 0
    # Run again after a kill in front of the manifest: those that stand are told of too.
    store.delete(published.manifest_key)
    before = told.copy()
    told.clear()
    publish_delta(store, **arguments)
    assert told == before


def test_a_second_publication_under_one_fence(location):
    lineage = Lineage(location, versions=1)
    base = Base("lin:0-0", lineage.published[0].root, lineage.published[0].manifest_key)
    again = publish_delta(lineage.store, old=lineage.weights[0], new=lineage.weights[1], version=V1, base=base, fence=0)
    assert again.adopted
    first = lineage.published[1]
    assert (again.manifest_key, again.root, again.bytes) == (first.manifest_key, first.root, first.bytes)
    other = step(lineage.weights[0], seed=99)
    with pytest.raises(ObjectExists, match="new fence"):
        publish_delta(lineage.store, old=lineage.weights[0], new=other, version=V1, base=base, fence=0)
    fenced = publish_delta(lineage.store, old=lineage.weights[0], new=other, version=V1, base=base, fence=1)
    assert not fenced.adopted
    assert fenced.manifest_key == "lineages/lin/0-1/1/manifest.json"


def test_a_target_whose_manifest_is_anothers_is_refused(location):
    lineage = Lineage(location, versions=2)
    right = lineage.target(2)
    wrong = Target(version=right.version, root=right.root, manifest=lineage.published[1].manifest_key)
    with pytest.raises(ManifestError, match="was named"):
        reconcile(lineage.store, lineage.shadow(0), wrong)


def test_a_fork_begins_with_its_parents_manifest(location):
    lineage = Lineage(location, versions=2)
    parent = lineage.target(2)
    first = Target(version="fork:0-0", root=parent.root, manifest=parent.manifest)
    shadow = lineage.shadow(0)
    reconcile(lineage.store, shadow, first)
    assert (shadow.version, shadow.root) == ("fork:0-0", parent.root)
    new = step(lineage.weights[2], seed=9)
    base = Base(first.version, first.root, first.manifest)
    version = VersionRef("fork", 0, 1)
    published = publish_delta(lineage.store, old=lineage.weights[2], new=new, version=version, base=base, fence=1)
    second = Target(version=str(version), root=published.root, manifest=published.manifest_key)
    for start in (shadow, lineage.shadow(0), lineage.shadow(1)):
        reconcile(lineage.store, start, second)
        assert (start.version, start.root) == ("fork:0-1", published.root)
    reconcile(lineage.store, shadow, first)
    assert (shadow.version, shadow.root) == ("fork:0-0", parent.root)


def test_a_chain_that_names_anothers_manifest_as_its_base_is_refused(location):
    lineage = Lineage(location, versions=3)
    crooked = Base("lin:0-3", lineage.published[3].root, lineage.published[1].manifest_key)
    new = step(lineage.weights[3], seed=50)
    published = publish_delta(
        lineage.store, old=lineage.weights[3], new=new, version=VersionRef("lin", 0, 4), base=crooked, fence=0
    )
    target = Target(version="lin:0-4", root=published.root, manifest=published.manifest_key)
    with pytest.raises(ManifestError, match="was named"):
        plan_path(lineage.store, lineage.shadow(0), target)
    assert len(plan_path(lineage.store, lineage.shadow(3), target)) == 1  # nobody needs to look at the base's manifest


def test_new_removed_reshaped_and_retyped_tensors(location):
    lineage = Lineage(location, versions=0)
    new = step(lineage.weights[0], seed=1)
    del new["model.layers.0.mlp.up_proj.weight"]
    new["model.new"] = torch.randn(3, 5)
    new["model.norm.weight"] = torch.randn(64).to(torch.bfloat16)
    new["model.layers.1.input_layernorm.weight"] = torch.randn(32).to(torch.float16)
    number = lineage.publish(new, onto=0)
    shadow = lineage.shadow(0)
    result = reconcile(lineage.store, shadow, lineage.target(number))
    assert same_bits(shadow.tensors, new)
    assert result.removed == ("model.layers.0.mlp.up_proj.weight",)
    assert "model.new" in result.changed
    assert not lineage.published[number].reversible
    # Such a delta cannot be taken back: the way to the old version is its snapshot.
    result = reconcile(lineage.store, shadow, lineage.target(0))
    assert kinds(result.hops) == [HopKind.SNAPSHOT]
    assert same_bits(shadow.tensors, lineage.weights[0])


def test_a_delta_that_only_removes_cannot_be_taken_back(location):
    lineage = Lineage(location, versions=0)
    new = {name: tensor for name, tensor in lineage.weights[0].items() if name != "model.norm.weight"}
    number = lineage.publish(new, onto=0)
    assert not lineage.published[number].reversible
    shadow = lineage.shadow(0)
    result = reconcile(lineage.store, shadow, lineage.target(number))
    assert result.removed == ("model.norm.weight",)
    assert kinds(reconcile(lineage.store, shadow, lineage.target(0)).hops) == [HopKind.SNAPSHOT]
    assert same_bits(shadow.tensors, lineage.weights[0])


def test_every_dtype_and_odd_shape(location):
    store = open_store(location)
    old = {
        "f64": torch.randn(3, dtype=torch.float64),
        "f32": torch.randn(4, 3),
        "f16": torch.randn(5).half(),
        "bf16": torch.randn(5).bfloat16(),
        "f8": torch.randn(7).to(torch.float8_e4m3fn),
        "f8b": torch.randn(7).to(torch.float8_e5m2),
        "i64": torch.arange(4),
        "u8": torch.arange(4, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "strided": torch.randn(4, 6).t(),
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name in ("f64", "f32", "f16", "bf16", "scalar"):
        new[name] = new[name] * -1.001
    new["f8"] = (old["f8"].float() * 2).to(torch.float8_e4m3fn)
    new["i64"] = old["i64"] - 2
    new["bool"] = ~old["bool"]
    snapshot = publish_snapshot(store, old, key_prefix="snapshots/a", version=V0)
    base = Base(str(V0), snapshot.root, snapshot.manifest_key)
    delta = publish_delta(store, old=old, new=new, version=V1, base=base, fence=0)
    shadow = ShadowWeights.from_tensors({"unrelated": torch.zeros(1)})
    reconcile(store, shadow, Target(version=str(V1), root=delta.root, manifest=delta.manifest_key))
    assert same_bits(shadow.tensors, {name: tensor.contiguous() for name, tensor in new.items()})


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_pair_of_bits_arrives(data, tmp_path_factory):
    words = st.lists(st.integers(0, 65535), min_size=1, max_size=40)
    old_words = data.draw(words)
    new_words = data.draw(st.lists(st.integers(0, 65535), min_size=len(old_words), max_size=len(old_words)))
    old, new = (
        {"w": torch.tensor(side, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)}
        for side in (old_words, new_words)
    )
    store = open_store(tmp_path_factory.mktemp("any"))
    base = Base(str(V0), weights_root(old))
    published = publish_delta(store, old=old, new=new, version=V1, base=base, fence=0)
    shadow = ShadowWeights.from_tensors(old)
    reconcile(store, shadow, Target(version=str(V1), root=published.root, manifest=published.manifest_key))
    assert same_bits(shadow.tensors, new)


def test_several_frames_and_segments(location, monkeypatch):
    monkeypatch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 1 << 20)
    generator = torch.Generator().manual_seed(0)
    old = {f"w{i}": torch.randn(3_000_000, generator=generator).bfloat16() for i in range(3)} | make_weights()
    store = open_store(location)
    snapshot = publish_snapshot(store, old, key_prefix="snapshots/a", version=V0, threads=2)
    manifest = read_manifest(store, snapshot.manifest_key)
    assert len(manifest.segments) > 2
    assert len(manifest.frames) > 2
    new = step(old, seed=1, lr=1e-5)
    base = Base(str(V0), snapshot.root, snapshot.manifest_key)
    delta = publish_delta(store, old=old, new=new, version=V1, base=base, fence=0, threads=2)
    alone = publish_delta(store, old=old, new=new, version=V1, base=base, fence=1, threads=1)
    assert read_manifest(store, delta.manifest_key).segments == [
        msgspec.structs.replace(segment, key=segment.key.replace("/1/", "/0/"))
        for segment in read_manifest(store, alone.manifest_key).segments
    ]
    shadow = ShadowWeights.from_tensors(make_weights(seed=4))
    seen = []
    reconcile(
        store,
        shadow,
        Target(version=str(V1), root=delta.root, manifest=delta.manifest_key),
        threads=2,
        on_progress=seen.append,
    )
    assert same_bits(shadow.tensors, new)
    assert (
        seen[-1].bytes_done
        == seen[-1].bytes_total
        == manifest.stored_bytes + read_manifest(store, delta.manifest_key).stored_bytes
    )
    assert [progress.bytes_done for progress in seen] == sorted(progress.bytes_done for progress in seen)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), frame_bytes=st.integers(1, 64))
def test_frames_cover_every_element_once_and_mix_no_groups(sizes, frame_bytes):
    tensors = [(index, "ab"[index % 2], size, 2) for index, size in enumerate(sizes)]
    frames = plan_frames(tensors, frame_bytes=frame_bytes)
    covered = sorted((p.tensor, e) for ranges in frames for p in ranges for e in range(p.start, p.start + p.count))
    assert covered == [(index, element) for index, size in enumerate(sizes) for element in range(size)]
    for ranges in frames:
        assert sum(piece.count for piece in ranges) <= max(1, frame_bytes // 2)
        assert len({piece.tensor % 2 for piece in ranges}) == 1


def test_a_shadow_of_a_checkpoint_folder(tmp_path):
    weights = make_weights()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    shadow = ShadowWeights.from_checkpoint(tmp_path, version="lin:0-0")
    assert shadow.root == weights_root(weights)
    shadow.tensors["model.norm.weight"].add_(1)  # memory of its own: the file stays as it is
    assert not shadow.recheck()
    assert shadow.poisoned
    assert ShadowWeights.from_checkpoint(tmp_path).root == weights_root(weights)
    with pytest.raises(ModelError):
        ShadowWeights.from_checkpoint(tmp_path / "nothing")
