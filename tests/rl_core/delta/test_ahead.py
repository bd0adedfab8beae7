"""Segments fetched while their version is being published: into the spool, one at a time, and away again."""

import threading
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from weightpairs import same_bits

from rl_core.delta import Base, ShadowWeights, Target, publish_delta, weights_root
from rl_core.delta.ahead import FetchAhead
from rl_core.delta.fetch import SegmentSource
from rl_core.delta.frames import plan_frames
from rl_core.delta.manifest import StandingSegment
from rl_core.delta.receiver import reconcile
from rl_core.delta.spool import Spool
from rl_core.errors import StoreUnavailable
from rl_core.store import open_store
from rl_core.types import VersionRef

FIRST = VersionRef("lin", 0, 1)


class Store:
    """A store that counts reads of segments, says how many are read at once, and fails or waits when it is told to."""

    def __init__(self, store):
        self.store, self.reading, self.most, self.keys = store, set(), 0, []
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = threading.Event()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get_range(self, key, *, start, length, of=None):
        self.asked.set()
        assert self.goes_on.wait(10)
        if self.fails:
            raise StoreUnavailable("it went away")
        self.reading.add(key)
        self.most = max(self.most, len(self.reading))
        time.sleep(0.01)  # for another to come, if it may
        data = self.store.get_range(key, start=start, length=length, of=of)
        self.keys.append(key)
        self.reading.discard(key)
        return data


class Rig:
    """A delta of many segments, as its publisher told of them, and a replica's spool."""

    def __init__(self, tmp_path):
        self.store = Store(open_store(tmp_path / "store"))
        generator = torch.Generator().manual_seed(0)
        self.old = {f"w{i}": (torch.randn(60_000, generator=generator) * 0.05).bfloat16() for i in range(8)}
        self.new = {name: tensor + 1e-3 for name, tensor in self.old.items()}
        self.standing = []
        self.published = publish_delta(
            self.store, old=self.old, new=self.new, version=FIRST, base=Base("lin:0-0", weights_root(self.old)),
            fence=7, on_segment=self.standing.append,
        )  # fmt: skip
        self.segments = [one.segment for one in self.standing]
        self.folder = tmp_path / "spool"
        self.spool = Spool(self.folder)
        self.ahead = FetchAhead(self.spool)

    @property
    def held(self):
        return {path.name for path in self.folder.iterdir()}

    def use(self, spool):
        self.ahead.close()
        self.spool, self.ahead = spool, FetchAhead(spool)

    def announce(self, segments, *, version=FIRST, fence=7):
        standing = [StandingSegment(segment) for segment in segments]
        self.ahead.announce(version, fence, standing, source=lambda: nullcontext(self.source()))

    def source(self, **more):
        return SegmentSource(self.store, spool=self.spool, **more)

    def settled(self):
        """Nothing waits or is under way."""
        with self.ahead._changed:
            idle = lambda: not self.ahead._fetching and self.ahead._next() is None  # noqa: E731
            assert self.ahead._changed.wait_for(idle, timeout=10)

    def update(self):
        shadow = ShadowWeights.from_tensors(self.old)
        target = Target(version=str(FIRST), root=self.published.root, manifest=self.published.manifest_key)
        with self.ahead.held():
            done = reconcile(self.store, shadow, target, source=self.source(ahead=self.ahead))
        assert same_bits(shadow.tensors, self.new)
        return done


@pytest.fixture
def rig(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 16 << 10)
    monkeypatch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=32 << 10))
    rig = Rig(tmp_path)
    assert len(rig.segments) > 6
    yield rig
    rig.store.goes_on.set()
    rig.ahead.close()


def digests(segments):
    return {segment.blake3 for segment in segments}


def test_what_was_brought_is_read_once_and_counted_as_fetched(rig):
    rig.announce(rig.segments[:4])
    rig.settled()
    assert rig.held == digests(rig.segments[:4])
    before = len(rig.store.keys)
    done = rig.update()
    assert done.bytes_fetched == sum(segment.size for segment in rig.segments)
    assert done.bytes_from_spool == 0
    assert done.store_s == done.fetch_s > 0
    assert {segment.key for segment in rig.segments[4:]} == set(rig.store.keys[before:])
    again = rig.update()
    assert (again.bytes_fetched, again.store_s) == (0, 0)


@pytest.mark.parametrize("kept", [3, 100])
def test_one_segment_is_under_way_and_none_while_an_update_reads(rig, kept):
    rig.use(Spool(rig.folder, max_bytes=kept * rig.segments[0].size))
    rig.store.goes_on.clear()
    rig.announce(rig.segments)
    assert rig.store.asked.wait(10)
    updated = []
    update = threading.Thread(target=lambda: updated.append(rig.update()))
    update.start()
    rig.store.asked.clear()
    assert not rig.store.asked.wait(0.5), "the update has to wait for the one that is under way"
    rig.store.goes_on.set()
    update.join(20)
    rig.settled()
    assert updated[0].bytes_fetched == sum(segment.size for segment in rig.segments)
    assert rig.store.most == 1
    assert len(rig.store.keys) == len({*rig.store.keys}) == len(rig.segments)


def test_what_is_announced_while_an_update_reads_comes_after_it(rig):
    with rig.ahead.held():
        rig.announce(rig.segments[:2])
        assert not rig.store.asked.wait(0.3)
    rig.settled()
    assert rig.held == digests(rig.segments[:2])


def test_what_an_attempt_withdraws_goes(rig):
    rig.announce(rig.segments[:3])
    rig.settled()
    rig.ahead.withdraw(FIRST, 6)  # another attempt's word
    assert rig.held == digests(rig.segments[:3])
    rig.store.goes_on.clear()
    rig.store.asked.clear()
    rig.announce(rig.segments[3:5])
    assert rig.store.asked.wait(10)
    rig.ahead.withdraw(FIRST, 7)  # in the middle of one
    rig.store.goes_on.set()
    rig.settled()
    assert rig.held == set()


def test_a_later_version_takes_nothing_from_an_update_that_reads(rig):
    """A slow replica is two versions behind: what it was brought is what it reads now."""
    rig.announce(rig.segments[:3])
    rig.settled()
    with rig.ahead.held():
        rig.announce([], version=VersionRef("lin", 0, 2))
        rig.announce([], version=VersionRef("lin", 0, 3))
        assert rig.held == digests(rig.segments[:3])
    rig.announce(rig.segments[:3], version=VersionRef("lin", 0, 3))
    rig.announce([], version=VersionRef("lin", 0, 5))
    rig.settled()
    assert rig.held == digests(rig.segments[:3])  # nobody was brought them for it: they were there


def test_what_is_announced_again_takes_no_room_again(rig):
    rig.use(Spool(rig.folder, max_bytes=sum(segment.size for segment in rig.segments)))
    for fence in (7, 7, 8):
        rig.announce(rig.segments[:4], fence=fence)
        rig.settled()
    rig.announce(rig.segments, fence=8)
    rig.settled()
    assert rig.held == digests(rig.segments)


def test_only_so_many_publications_are_remembered(rig):
    rig.announce(rig.segments[:2])
    rig.settled()
    for lineage in "abcdefgh":
        rig.announce([], version=VersionRef(lineage, 0, 1))
    assert rig.held == set()


def test_a_newer_attempt_keeps_what_an_older_one_had_brought(rig):
    rig.announce(rig.segments[:3])
    rig.settled()
    rig.announce(rig.segments[:4], fence=8)
    rig.announce(rig.segments[4:], fence=7)  # late, of the attempt that lost
    rig.settled()
    assert rig.held == digests(rig.segments[:4])
    assert len(rig.store.keys) == 4
    rig.ahead.withdraw(FIRST, 8)
    assert rig.held == set()


@pytest.mark.parametrize(
    ("later", "stays"),
    [(VersionRef("lin", 0, 2), True), (VersionRef("lin", 0, 3), False), (VersionRef("lin", 1, 2), False),
     (VersionRef("other", 0, 3), True)],
)  # fmt: skip
def test_what_came_to_nothing_goes_with_a_later_version(rig, later, stays):
    rig.announce(rig.segments[:3])
    rig.settled()
    rig.announce(rig.segments[5:6], version=later)
    rig.settled()
    assert rig.held == digests(rig.segments[5:6]) | (digests(rig.segments[:3]) if stays else set())


def test_what_an_update_took_stays_for_peers(rig):
    rig.announce(rig.segments)
    rig.settled()
    rig.update()
    rig.ahead.withdraw(FIRST, 7)
    assert rig.held == digests(rig.segments)


def test_a_spool_without_room_is_not_filled(rig):
    rig.use(Spool(rig.folder, max_bytes=rig.segments[0].size + rig.segments[1].size))
    rig.announce(rig.segments)
    rig.settled()
    assert rig.held == digests(rig.segments[:2])
    assert len(rig.store.keys) == 2
    rig.update()


def test_a_store_that_fails_leaves_the_rest_to_what_comes(rig):
    rig.store.fails = True
    rig.announce(rig.segments[:3])
    rig.settled()
    assert rig.held == set()
    rig.store.fails = False
    rig.announce(rig.segments[3:5])
    rig.settled()
    assert rig.held == digests(rig.segments[3:5])
    rig.update()
