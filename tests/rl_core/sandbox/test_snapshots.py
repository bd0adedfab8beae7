"""The store of snapshots: bounded, the longest unused goes first, nothing in use goes, damage is found."""

import os

import pytest

from rl_core.errors import SpecError
from rl_core.sandbox.protocol import SnapshotMissing
from rl_core.sandbox.snapshots import SnapshotsFull, SnapshotStore
from rl_core.sandbox.trees import encode_tree


def tree(letter):
    return encode_tree({"file": letter * 1000})[1]


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path / "snapshots", 3500)


def freeze_in_turn(store, *letters):
    """Names of snapshots, each older than the next."""
    names = [store.freeze(tree(letter)) for letter in letters]
    for age, name in enumerate(names):
        os.utime(store._folder / name, (age, age))
    return names


def test_what_is_frozen_is_read_only_and_read_back(store):
    name = store.freeze(tree(b"a"))
    assert store.freeze(tree(b"a")) == name
    assert (store._folder / name).stat().st_mode & 0o777 == 0o400
    with store.use(name) as snapshot:
        assert snapshot.read("file") == b"a" * 1000
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(snapshot.descriptor, b"x")


def test_the_longest_unused_goes_first(store):
    a, b, c = freeze_in_turn(store, b"a", b"b", b"c")
    assert store.has(a)  # which is a use
    store.freeze(tree(b"d"))
    assert [store.has(name) for name in (a, b, c)] == [True, False, True]


def test_nothing_in_use_goes(store):
    a, b, c = freeze_in_turn(store, b"a", b"b", b"c")
    with store.use(a), store.use(b):
        store.freeze(tree(b"d"))
        assert [store.has(name) for name in (a, b, c)] == [True, True, False]
        with store.use(store.freeze(tree(b"d"))), pytest.raises(SnapshotsFull, match="raise --snapshot-bytes"):
            store.freeze(tree(b"e"))
    store.freeze(tree(b"e"))


def test_damage_is_found_by_a_new_store_and_removed(store, tmp_path):
    name = store.freeze(tree(b"a"))
    path = store._folder / name
    path.chmod(0o600)
    path.write_bytes(tree(b"b"))
    (store._folder / "torn.part").write_bytes(b"x")
    again = SnapshotStore(tmp_path / "snapshots", 3500)
    assert [path.name for path in again._folder.iterdir()] == [name]
    with pytest.raises(SnapshotMissing, match="damaged"), again.use(name):
        pass
    assert not again.has(name)
    assert again.freeze(tree(b"a")) == name


def test_what_is_no_snapshot_is_not_kept(store):
    with pytest.raises(SpecError):
        store.freeze(b"7\n1 ../a\nx")
    assert list(store._folder.iterdir()) == []
