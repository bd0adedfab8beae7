"""What holds on S3 as well, on a server that fails; the rest of the suite runs there too, marked full."""

import pytest
from s3_server import Fault

from rl_core.errors import ObjectExists, ObjectMissing, StoreUnavailable, StoreUnsuitable
from rl_core.store import open_store


def test_a_second_writer_is_refused_and_the_store_asked_once_whether_it_does(s3):
    store = open_store(s3.url())
    store.put("a", b"first")
    with pytest.raises(ObjectExists):
        store.put("a", b"second")
    assert store.get("a") == b"first"
    puts = [request for request in s3.requests if request.method == "PUT"]
    assert [("probes" in request.path) for request in puts] == [True, True, False, False]
    assert all(request.headers["if-none-match"] == "*" for request in puts)
    assert [info.key for info in store.list()] == ["a"]


def test_a_server_that_overwrites_is_refused_before_anything_is_written(s3):
    s3.overwrites = True
    store = open_store(s3.url())
    with pytest.raises(StoreUnsuitable, match="ignores If-None-Match"):
        store.put("a", b"first")
    assert list(store.list()) == []


@pytest.mark.parametrize("fault", list(Fault))
def test_one_fault_costs_a_retry(s3, fault):
    store = open_store(s3.url())
    store.put("other", b"")
    store.put("a", bytes(range(256)) * 64)
    for call in (
        lambda: store.get("a") == bytes(range(256)) * 64,
        lambda: store.get_range("a", start=3, length=1000) == (bytes(range(256)) * 64)[3:1003],
        lambda: store.head("a").size_bytes == 256 * 64,
        lambda: {info.key for info in store.list()} >= {"a", "other"},
        lambda: store.put_or_adopt(f"b/{fault}", b"b" * 5000) in (True, False),
        lambda: store.get(store.put_blob(f"blob {fault}".encode())) == f"blob {fault}".encode(),
        lambda: store.delete("other") is None,
    ):
        left = [fault]
        s3.faults = lambda request, left=left: left.pop() if left else None
        assert call()
        assert not left
    assert store.get(f"b/{fault}") == b"b" * 5000


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUSY])
def test_a_store_that_goes_on_failing_is_unavailable(s3, fault):
    store = open_store(s3.url())
    store.put("a", b"x")
    s3.faults = lambda request: fault
    with pytest.raises(StoreUnavailable, match="check that the store is up") as caught:
        store.get("a")
    assert caught.value.retryable
    s3.reset()
    assert store.get("a") == b"x"


def test_a_bucket_that_is_not_there(s3):
    with pytest.raises((ObjectMissing, StoreUnavailable)):
        open_store("s3://nowhere/x").put("a", b"x")


def test_a_mirror_over_http_is_read_only(s3):
    url = s3.url()
    open_store(url).put("a/b", b"0123456789")
    mirror = open_store(f"{s3.endpoint}/{url.removeprefix('s3://')}")
    assert mirror.get("a/b") == b"0123456789"
    assert mirror.get_range("a/b", start=2, length=3) == b"234"
