"""A version that several processes publish, each its own tensors."""

from functools import partial

import pytest
from weightpairs import make_weights, replace, same_bits, step

from rl_core.delta import (
    Base,
    Manifest,
    ShadowWeights,
    Target,
    merge_parts,
    publish_delta,
    publish_snapshot,
    read_manifest,
    reconcile,
    weights_root,
)
from rl_core.delta.root import weights_leaves
from rl_core.errors import BaseMismatch, ManifestError, ObjectExists, ObjectMissing
from rl_core.store import open_store
from rl_core.types import VersionRef

V0, V1 = VersionRef("lin", 0, 0), VersionRef("lin", 0, 1)
PARTS = 3


class Shards:
    """A step from old to new weights, dealt out to processes."""

    def __init__(self, store, old, new):
        self.store, self.old, self.new = store, old, new
        self.base, self.leaves = Base(str(V0), weights_root(old)), weights_leaves(old)

    def of(self, weights, number):
        return {name: tensor for index, (name, tensor) in enumerate(sorted(weights.items())) if index % PARTS == number}

    def publish(self, number, *, old=None, new=None, fence=4, version=V1):
        new = self.of(self.new, number) if new is None else new
        old = {name: tensor for name, tensor in (self.old if old is None else old).items() if name in new}
        base = Base(str(V0), weights_root(old))
        return publish_delta(self.store, old=old, new=new, version=version, base=base, fence=fence, part=number)

    def merge(self, **other):
        said = {"parts": PARTS, "version": V1, "base": self.base, "fence": 4, "base_leaves": self.leaves} | other
        return merge_parts(self.store, **said)


@pytest.fixture
def shards(location):
    old = make_weights(layers=4)
    return Shards(open_store(location), old, step(old, seed=1, lr=1e-3))


def test_parts_make_the_version_that_one_publisher_makes(shards):
    for number in range(PARTS):
        shards.publish(number)
    made = shards.merge()
    whole = publish_delta(shards.store, old=shards.old, new=shards.new, version=V1, base=shards.base, fence=5)
    manifests = [read_manifest(shards.store, key) for key in (made.manifest_key, whole.manifest_key)]
    assert manifests[0].tensors == manifests[1].tensors
    assert (made.root, made.changed_elements, made.elements, made.full_bytes, made.reversible) == (
        whole.root, whole.changed_elements, whole.elements, whole.full_bytes, True,
    )  # fmt: skip
    assert len(manifests[0].segments) == PARTS
    shadow = ShadowWeights.from_tensors(shards.old)
    reconcile(shards.store, shadow, Target(version=str(V1), root=made.root, manifest=made.manifest_key))
    assert same_bits(shadow.tensors, shards.new)
    back = {"version": str(V0), "root": shards.base.root, "manifest": "lineages/lin/0-0/0/manifest.json"}
    reconcile(shards.store, shadow, Target(**back, deltas=(made.manifest_key,)))
    assert same_bits(shadow.tensors, shards.old)


def test_a_merge_is_run_again_and_says_no_other_thing(shards):
    for number in range(PARTS):
        shards.publish(number)
        assert shards.publish(number).adopted
    made = shards.merge()
    again = shards.merge()
    assert again.adopted
    assert (again.root, again.bytes) == (made.root, made.bytes)
    replace(shards.store, made.manifest_key, b"another")
    with pytest.raises(ObjectExists, match="new fence"):
        shards.merge()


def test_a_part_that_is_missing_or_of_something_else_is_refused(shards):
    shards.publish(0)
    shards.publish(1)
    with pytest.raises(ObjectMissing):
        shards.merge()
    key = shards.publish(2, fence=5).manifest_key
    shards.store.put(key.replace("/5/", "/4/"), shards.store.get(key))
    with pytest.raises(ManifestError, match="not of this delta"):
        shards.merge()
    shards.store.delete(key.replace("/5/", "/4/"))
    with pytest.raises(ManifestError, match="not of this snapshot"):
        shards.merge(parts=2, base=None, base_leaves=None)


def test_all_parts_that_were_published_are_merged(shards):
    for number in range(PARTS):
        shards.publish(number)
    for parts in (PARTS - 1, 0):
        with pytest.raises(ManifestError, match=f"other parts than {parts}"):
            shards.merge(parts=parts)
    with pytest.raises(ObjectMissing):
        shards.merge(parts=PARTS + 1)


def test_parts_of_different_builds_are_not_merged(shards, monkeypatch):
    shards.publish(0)
    shards.publish(1)
    monkeypatch.setattr("rl_core.delta.publisher.Manifest", partial(Manifest, codec="frames/3"))
    shards.publish(2)
    with pytest.raises(ManifestError, match="different builds"):
        shards.merge()


def test_a_part_that_was_made_from_other_weights_is_found(shards):
    shards.publish(0)
    shards.publish(1, old=shards.new)
    shards.publish(2)
    with pytest.raises(BaseMismatch, match="part 1"):
        shards.merge()
    with pytest.raises(BaseMismatch, match="leaves"):
        shards.merge(base_leaves=weights_leaves(shards.new))
    assert not [info.key for info in shards.store.list() if info.key.endswith("/4/manifest.json")]


def test_a_tensor_is_in_one_part(shards):
    for number in range(PARTS):
        shards.publish(
            number, new=shards.of(shards.new, number) | {"model.norm.weight": shards.new["model.norm.weight"]}
        )
    with pytest.raises(ManifestError, match="same tensor"):
        shards.merge()


def test_new_and_dropped_tensors(shards):
    shards.new["added"] = shards.new["model.norm.weight"] * 2
    del shards.new["model.layers.1.mlp.up_proj.weight"]
    for number in range(PARTS):
        shards.publish(number)
    made = shards.merge()
    assert not made.reversible
    shadow = ShadowWeights.from_tensors(shards.old)
    reconcile(shards.store, shadow, Target(version=str(V1), root=made.root, manifest=made.manifest_key))
    assert same_bits(shadow.tensors, shards.new)


def test_a_delta_that_drops_a_tensor_does_not_apply_backwards(shards):
    del shards.new["model.layers.1.mlp.up_proj.weight"]
    for number in range(PARTS):
        assert shards.publish(number).reversible
    assert not shards.merge().reversible


def test_snapshots_have_parts_too(shards):
    for number in range(PARTS):
        tensors = shards.of(shards.new, number)
        publish_snapshot(shards.store, tensors, key_prefix="snapshots/7", version=V1, fence=4, part=number)
    made = shards.merge(base=None, base_leaves=None, key_prefix="snapshots/7")
    assert made.root == weights_root(shards.new)
    shadow = ShadowWeights.from_tensors({})
    reconcile(shards.store, shadow, Target(version=str(V1), root=made.root, manifest=made.manifest_key))
    assert same_bits(shadow.tensors, shards.new)
