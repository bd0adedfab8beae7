import errno
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DigestMismatch, ObjectExists, ObjectMissing, SpecError, StoreUnavailable
from rl_core.store import check_key, open_store


def test_put_creates_once_and_never_overwrites(location):
    store = open_store(location)
    store.put("a/b.json", b"first")
    with pytest.raises(ObjectExists):
        store.put("a/b.json", b"second")
    assert store.get("a/b.json") == b"first"


def test_put_or_adopt_takes_equal_bytes_and_refuses_others(location):
    store = open_store(location)
    assert store.put_or_adopt("k", b"abc") is True
    assert store.put_or_adopt("k", b"abc") is False
    for other in (b"abd", b"abcd", b""):
        with pytest.raises(ObjectExists):
            store.put_or_adopt("k", other)


def test_the_store_copies_an_object(location):
    store = open_store(location)
    store.put("a/k", b"abc")
    store.copy("a/k", "b/k")
    store.delete("a/k")
    assert store.get("b/k") == b"abc"
    with pytest.raises(ObjectMissing):
        store.copy("a/k", "b/other")
    for unsafe in (("../k", "c"), ("b/k", "../c")):
        with pytest.raises(SpecError):
            store.copy(*unsafe)


def test_an_object_is_put_in_parts(location):
    store = open_store(location)
    store.put("k", [b"ab", memoryview(bytearray(b"cd")), b"", b"e"])
    assert store.get("k") == b"abcde"
    with pytest.raises(ObjectExists):
        store.put("k", [b"abcde"])


def test_ranges_head_list_delete(location):
    store = open_store(location)
    store.put("x/1", bytes(range(100)))
    store.put("x/2", b"")
    store.put("y/1", b"y")
    assert store.get_range("x/1", start=10, length=5) == bytes(range(10, 15))
    assert store.get_range("x/1", start=10, length=0) == b""
    assert store.head("x/1").size_bytes == 100
    assert store.head("x/1").modified.tzinfo is not None
    assert {info.key for info in store.list("x")} == {"x/1", "x/2"}
    assert len(list(store.list())) == 3
    store.delete("x/1")
    store.delete("x/1")
    assert not store.exists("x/1")


def test_a_range_past_the_end_is_an_error_not_a_short_read(location):
    store = open_store(location)
    store.put("k", b"0123456789")
    with pytest.raises(StoreUnavailable):
        store.get_range("k", start=5, length=20)


def test_missing_objects_are_named(location):
    store = open_store(location)
    for call in (store.get, store.head, lambda key: store.get_range(key, start=0, length=1)):
        with pytest.raises(ObjectMissing, match="no/such"):
            call("no/such")


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", "a/...", "a b", "a\n", "a#1", "-a", "ä"]
)
def test_unsafe_keys_are_refused_before_the_store_sees_them(tmp_path, key):
    with pytest.raises(SpecError, match="not a safe object key"):
        open_store(tmp_path).put(key, b"x")
    assert list(tmp_path.iterdir()) == []


@given(key=st.text(max_size=40))
def test_no_accepted_key_leaves_the_store(key):
    try:
        check_key(key)
    except SpecError:
        return
    assert Path("/root", key).resolve().is_relative_to("/root")
    assert Path("/root", key).resolve() != Path("/root")


def test_blobs_are_named_by_content_and_idempotent(location):
    store = open_store(location)
    key = store.put_blob(b"trajectory")
    digest = blake3(b"trajectory").hexdigest()
    assert key == f"blobs/{digest[:2]}/{digest}"
    assert store.put_blob(b"trajectory") == key
    assert store.get_blob(key) == b"trajectory"


def test_a_damaged_blob_is_never_returned(tmp_path):
    store = open_store(tmp_path)
    key = store.put_blob(b"trajectory")
    (tmp_path / key).write_bytes(b"trajectorx")
    with pytest.raises(DigestMismatch):
        store.get_blob(key)
    with pytest.raises(SpecError):
        store.get_blob("lineages/x/manifest.json")


def test_a_torn_blob_is_never_adopted(tmp_path):
    store = open_store(tmp_path)
    key = store.put_blob(b"trajectory")
    (tmp_path / key).write_bytes(b"traj")
    with pytest.raises(DigestMismatch, match="delete it"):
        store.put_blob(b"trajectory")


@pytest.fixture
def synced(monkeypatch):
    """Inodes that the disk was told to write."""
    seen, fsync = set(), os.fsync

    def watched(descriptor):
        fsync(descriptor)
        seen.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", watched)
    return seen


def test_an_object_and_its_folders_are_on_the_disk_before_it_is_said_to_exist(tmp_path, synced):
    store = open_store(tmp_path)
    for create in (
        lambda: store.put("a/b/c", b"x"),
        lambda: store.put_or_adopt("a/b/c", b"x"),  # the writer before may have died between the two
        lambda: store.copy("a/b/c", "a/b/c2"),
    ):
        synced.clear()
        create()
        assert synced == {(tmp_path / part).stat().st_ino for part in ("a/b/c", "a/b", "a", ".")}
    key = store.put_blob(b"y")
    synced.clear()
    assert store.put_blob(b"y") == key
    assert (tmp_path / key).stat().st_ino in synced


def test_a_disk_that_does_not_take_it_is_said(tmp_path, monkeypatch):
    def fails(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    store = open_store(tmp_path)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        store.put("k", b"x")


@pytest.mark.parametrize("form", ["path", "text", "file"])
def test_a_folder_can_be_named_three_ways(tmp_path, form):
    folder = tmp_path / "new folder"
    url = {"path": folder, "text": str(folder), "file": folder.as_uri()}[form]
    open_store(url).put("k", b"v")
    assert (folder / "k").read_bytes() == b"v"


def test_a_memory_store_keeps_the_same_contract():
    store = open_store("memory:///")
    store.put("k", b"v")
    with pytest.raises(ObjectExists):
        store.put("k", b"w")
    assert store.get("k") == b"v"


@pytest.mark.parametrize("url", ["ftp://host/x", "file://host/x", "nonsense://x"])
def test_urls_that_name_no_store(url):
    with pytest.raises(SpecError, match="not a store"):
        open_store(url)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot open"):
        open_store(tmp_path / "f" / "store")


def test_no_space_left_says_so_and_leaves_nothing_behind(tmp_path):
    # In a process of its own: a file size limit cannot be raised again.
    script = textwrap.dedent(
        """
        import resource, sys
        from rl_core.errors import StoreUnavailable
        from rl_core.store import open_store
        store = open_store(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store.put("small", b"s" * 1000)
        try:
            store.put("large", b"l" * 1_000_000)
        except StoreUnavailable as error:
            assert error.retryable
            assert "no space left" in str(error) and "free space" in str(error), error
            sys.exit(42)
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 42, done.stderr
    assert [info.key for info in open_store(tmp_path).list()] == ["small"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000
