"""Where segments come from: the spool, peers, the store under a limit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from weightpairs import Lineage, same_bits

from rl_core.delta import ReconcilePhase, ShadowWeights, Target, publish_snapshot, read_manifest, reconcile
from rl_core.delta.fetch import CONNECTIONS, RateLimit, SegmentSource
from rl_core.delta.frames import plan_frames
from rl_core.delta.manifest import Segment
from rl_core.delta.peers import Wanted
from rl_core.delta.spool import Spool
from rl_core.errors import DigestMismatch, Interrupted, StoreUnavailable
from rl_core.store import open_store
from rl_core.types import VersionRef

MANY = 6


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """A snapshot of several segments of a little over 256 KiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 1 << 18)
        patch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=1 << 18))
        store = open_store(tmp_path_factory.mktemp("store"))
        generator = torch.Generator().manual_seed(0)
        weights = {
            f"w{i}.{dtype}": (torch.randn(150_000, generator=generator) * 0.02).to(getattr(torch, dtype))
            for i in range(MANY)
            for dtype in ("bfloat16", "float32")
        }
        published = publish_snapshot(store, weights, key_prefix="snapshots/a", version=VersionRef("lin", 0, 0))
    segments = read_manifest(store, published.manifest_key).segments
    target = Target(version="lin:0-0", root=published.root, manifest=published.manifest_key)
    return store, weights, target, segments


def empty():
    return ShadowWeights.from_tensors({"w": torch.zeros(3)})


class Counting:
    """A store that counts what is read of segments."""

    def __init__(self, store):
        self.store, self.bytes_read, self.fails_after = store, 0, None

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get_range(self, key, *, start, length, of=None):
        if self.fails_after is not None and self.bytes_read + length > self.fails_after:
            raise StoreUnavailable("it went away")
        self.bytes_read += length
        return self.store.get_range(key, start=start, length=length, of=of)


def test_what_was_spooled_is_not_read_again(snapshot, tmp_path):
    store, weights, target, segments = snapshot
    assert len(segments) >= MANY
    total = sum(segment.size for segment in segments)
    counting = Counting(store)
    counting.fails_after = total // 2
    spool = Spool(tmp_path)
    with pytest.raises(StoreUnavailable):
        reconcile(store, empty(), target, source=SegmentSource(counting, spool=spool))
    before = counting.bytes_read
    counting.fails_after = None
    shadow = empty()
    result = reconcile(store, shadow, target, source=SegmentSource(counting, spool=Spool(tmp_path)))
    assert same_bits(shadow.tensors, weights)
    assert result.bytes_from_spool > 0
    assert result.bytes_from_spool + result.bytes_fetched == total
    assert counting.bytes_read - before == result.bytes_fetched
    assert counting.bytes_read <= total + max(segment.size for segment in segments)


def test_progress_counts_every_byte_once(snapshot, tmp_path):
    store, _, target, segments = snapshot
    told = []
    reconcile(store, empty(), target, source=SegmentSource(store, spool=Spool(tmp_path)), on_progress=told.append)
    total = sum(segment.size for segment in segments)
    assert [one.bytes_done for one in told] == sorted(one.bytes_done for one in told)
    assert told[-1].bytes_done == total == told[0].bytes_total
    assert [one.phase for one in told][-2:] == [ReconcilePhase.DECODE, ReconcilePhase.VERIFY]
    assert len({one.bytes_done for one in told}) > len(segments)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_spool_is_read_again_from_the_store(snapshot, tmp_path, damage):
    store, weights, target, segments = snapshot
    reconcile(store, empty(), target, source=SegmentSource(store, spool=Spool(tmp_path)))
    path = tmp_path / segments[1].blake3
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes({"flip": data, "cut": data[:-1], "empty": b""}[damage])
    shadow = empty()
    result = reconcile(store, shadow, target, source=SegmentSource(store, spool=Spool(tmp_path)))
    assert result.bytes_fetched == segments[1].size
    assert same_bits(shadow.tensors, weights)


def test_the_spool_is_bounded_and_forgets_what_was_not_used_longest(tmp_path):
    spool = Spool(tmp_path, max_bytes=1000)
    segments = [segment_of(bytes([number]) * 400) for number in range(3)]
    for number, segment in enumerate(segments):
        assert spool.put(segment, bytes([number]) * 400)
        if number == 1:
            assert spool.get(segments[0]) is not None  # used: the other one goes
    assert [spool.get(segment) is not None for segment in segments] == [True, False, True]
    assert not spool.put(segment_of(b"x" * 1001), b"x" * 1001)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000


def segment_of(data: bytes) -> Segment:
    from blake3 import blake3

    return Segment("lineages/x", len(data), blake3(data).hexdigest())


def test_leftovers_of_a_kill_are_swept(tmp_path):
    (tmp_path / ".part-dead").write_bytes(b"x" * 10)
    spool = Spool(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert spool.path("../../etc/passwd") is None


def test_a_full_disk_under_the_spool_costs_a_warning(snapshot, tmp_path, monkeypatch):
    store, weights, target, segments = snapshot
    spool = Spool(tmp_path)

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    shadow = empty()
    result = reconcile(store, shadow, target, source=SegmentSource(store, spool=spool))
    assert same_bits(shadow.tensors, weights)
    assert result.bytes_fetched == sum(segment.size for segment in segments)
    assert list(tmp_path.iterdir()) == []


def test_a_spool_that_is_no_folder(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(StoreUnavailable, match="name another one"):
        Spool(tmp_path / "f")


def test_a_limit_is_kept(monkeypatch):
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", sleep)
    limit = RateLimit(1000)
    limit.take(500)  # the link is free, and carries it in half a second
    assert now[0] == pytest.approx(100.5)
    now[0] = 100.25
    limit.take(500)  # asked for while the first is under way: after it
    assert now[0] == pytest.approx(101.0)
    now[0] = 200.0
    limit.take(100)
    assert now[0] == pytest.approx(200.1)


def test_who_is_called_off_does_not_wait_for_the_link(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: called_off.append(True))
    called_off: list[bool] = []
    with pytest.raises(Interrupted):
        RateLimit(1).take(10**9, interrupted=lambda: bool(called_off))


def test_under_a_limit_parts_are_small(snapshot):
    store, _, _, segments = snapshot
    arrived = []
    source = SegmentSource(store, limit_bytes_s=2e6)
    assert [one.number for one in source.stream(segments[:1], on_bytes=arrived.append)] == [0]
    assert max(arrived) <= 250_000
    assert sum(arrived) == segments[0].size


class FailsFirst:
    """A store whose first read fails."""

    def __init__(self):
        self.reads = 0

    def get_range(self, key, *, start, length, of=None):
        self.reads += 1
        raise StoreUnavailable("it went away")


def test_after_a_part_that_failed_nothing_of_the_segment_is_read_any_more():
    """Or it would go on beside what is read next, over a link that has a limit."""
    store = FailsFirst()
    segment = Segment("segments/0000-x", 64 << 16, "0" * 64)
    source = SegmentSource(store, limit_bytes_s=1 << 19)
    with ThreadPoolExecutor(CONNECTIONS) as parts:
        with pytest.raises(StoreUnavailable):
            source.fetch(0, segment, on_bytes=lambda count: None, parts=parts)
        read = store.reads
        parts.submit(lambda: None).result()
    assert store.reads == read <= CONNECTIONS + 1


class FakePeers:
    """Answers with what it is given, as a peer that was verified does."""

    def __init__(self, data):
        self.data, self.done = data, []

    def fetch(self, segment, *, on_bytes):
        data = self.data.get(segment.blake3)
        if data is not None:
            on_bytes(len(data))
        return data

    def arrived(self, segment):
        self.done.append(segment.blake3)


def test_peers_are_asked_before_the_store(snapshot, tmp_path):
    store, weights, target, segments = snapshot
    some = {segment.blake3: bytearray(store.get(segment.key)) for segment in segments[::2]}
    peers = FakePeers(some)
    shadow = empty()
    result = reconcile(store, shadow, target, source=SegmentSource(store, spool=Spool(tmp_path), peers=peers))
    assert same_bits(shadow.tensors, weights)
    assert result.bytes_from_peers == sum(len(data) for data in some.values())
    assert result.bytes_fetched == sum(segment.size for segment in segments)
    assert peers.done == [segment.blake3 for segment in segments]


def test_a_peer_is_told_when_a_segment_was_given_up(snapshot):
    store, _, _, segments = snapshot
    peers = FakePeers({})
    gone = Segment("lineages/gone", segments[0].size, segments[0].blake3)
    with pytest.raises(OSError, match="nothing is stored"):
        list(SegmentSource(store, peers=peers).stream([gone], on_bytes=lambda count: None))
    assert peers.done == [gone.blake3]


def test_nobody_waits_for_somebody_who_waits_for_it():
    one, two = Wanted(), Wanted()
    digest = "ab" * 32
    assert not one.coming(digest, "5")
    one.ask_peers(digest, "1")
    two.ask_peers(digest, "2")
    assert one.coming(digest, "2")
    assert not two.coming(digest, "1")
    two.read_store(digest)
    assert two.coming(digest, "1")
    two.arrived(digest)
    assert not two.coming(digest, "1")


def test_wrong_bytes_in_the_store_are_refused_and_never_spooled(tmp_path):
    lineage = Lineage(tmp_path / "store", versions=1)
    segment = read_manifest(lineage.store, lineage.published[1].manifest_key).segments[0]
    path = tmp_path / "store" / segment.key
    data = bytearray(path.read_bytes())
    data[-1] ^= 128
    path.write_bytes(data)
    spool = Spool(tmp_path / "spool")
    with pytest.raises(DigestMismatch):
        reconcile(lineage.store, lineage.shadow(0), lineage.target(1), source=SegmentSource(lineage.store, spool=spool))
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_segment_is_fetched_while_the_one_before_is_worked_on(snapshot):
    """The second is asked for before the first is handed out, and no third before it is taken."""
    store, _, _, segments = snapshot
    asked, second = [], threading.Event()

    class Watching(Counting):
        def get_range(self, key, *, start, length, of=None):
            asked.append(key)
            if key == segments[1].key:
                second.set()
            return super().get_range(key, start=start, length=length, of=of)

    stream = SegmentSource(Watching(store)).stream(segments, on_bytes=lambda count: None)
    first = next(stream)
    assert second.wait(10)
    assert first.number == 0
    assert {segments.index(next(s for s in segments if s.key == key)) for key in asked} == {0, 1}
    assert [fetched.number for fetched in stream] == list(range(1, len(segments)))
