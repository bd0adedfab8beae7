"""Segments decoded while their version is being published: taken back whole, or gone on with and not decoded again."""

import random
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from weightpairs import same_bits

from rl_core.delta import Base, ShadowWeights, Target, publish_delta, publish_snapshot, read_manifest, reconcile
from rl_core.delta.ahead import FetchAhead
from rl_core.delta.apply import decode_frame
from rl_core.delta.early import DecodeAhead
from rl_core.delta.fetch import SegmentSource
from rl_core.delta.frames import plan_frames
from rl_core.delta.manifest import TensorRange
from rl_core.delta.path import HopKind
from rl_core.delta.root import leaf_hash
from rl_core.delta.spool import Spool
from rl_core.errors import DigestMismatch, Interrupted, ObjectMissing, StoreUnavailable
from rl_core.store import open_store
from rl_core.types import VersionRef

OLD, NEXT = VersionRef("lin", 0, 0), VersionRef("lin", 0, 1)


def weights():
    """Two dtypes, tensors that share frames, and one that no step changes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"b{n}": (torch.randn(30_000, generator=generator) * 0.05).bfloat16() for n in range(5)}
    tensors |= {f"f{n}": torch.randn(9_000 * n + 400, generator=generator) * 0.05 for n in range(3)}
    return tensors | {"c": torch.zeros(5000), "a": torch.arange(300)}


def moved(tensors, *, seed, share=0.05):
    generator = torch.Generator().manual_seed(seed)
    out = dict(tensors)
    for name in sorted(tensors.keys() - {"c"}):
        mask = torch.rand(tensors[name].shape, generator=generator) < share
        out[name] = torch.where(mask, tensors[name] * 1.01 + 1e-3, tensors[name]).to(tensors[name].dtype)
    out["a"] = tensors["a"] + (torch.rand(300, generator=generator) < share)
    return out


def others(tensors):
    """Weights that have nothing to do with the ones before: no patch is smaller than they are."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in tensors.items()}


class Publishing:
    """A version's publication as its publisher told of it."""

    def __init__(self, store, base, old, new, *, version=NEXT, fence=7):
        self.version, self.fence, self.weights = version, fence, new
        self.told = []
        self.published = publish_delta(
            store, old=old, new=new, version=version, base=base, fence=fence, on_segment=self.told.append
        )
        self.manifest = read_manifest(store, self.published.manifest_key)

    def target(self, snapshot=None):
        made = self.published
        return Target(version=str(self.version), root=made.root, manifest=made.manifest_key, snapshot=snapshot)


class World:
    """A store with a base and what is made from it."""

    def __init__(self, folder):
        self.store, self.old = open_store(folder / "store"), weights()
        self.snapshot = publish_snapshot(self.store, self.old, key_prefix="snapshots/lin", version=OLD)
        base = Base(str(OLD), self.snapshot.root, self.snapshot.manifest_key)
        make = partial(Publishing, self.store, base, self.old)
        self.next = make(moved(self.old, seed=1))
        self.rival = make(moved(self.old, seed=2), fence=8)  # another attempt, which made other weights
        self.side = make(moved(self.old, seed=3), version=VersionRef("side", 0, 1))
        self.whole = make(others(self.old), version=VersionRef("w", 0, 1))
        after = Base(str(NEXT), self.next.published.root, self.next.published.manifest_key)
        later = moved(self.next.weights, seed=4)
        self.later = Publishing(self.store, after, self.next.weights, later, version=VersionRef("lin", 0, 2))

    def home(self):
        return Target(version=str(OLD), root=self.snapshot.root, manifest=self.snapshot.manifest_key)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 2 << 10)
        patch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=12 << 10))
        made = World(tmp_path_factory.mktemp("world"))
    assert len(made.next.told) > 5
    return made


class Replica:
    """A spool and a shadow that stands at the base; `kill` and begin again with another on the same spool."""

    def __init__(self, world, folder):
        self.world, self.folder = world, folder
        self.spool = Spool(folder)
        self.fetching = FetchAhead(self.spool)
        self.decoding = DecodeAhead(self.fetching, self.spool, "default")
        manifest = world.snapshot.manifest_key
        self.shadow = ShadowWeights.from_tensors(world.old, version=str(OLD), manifest_key=manifest)
        self.holds = world.old
        self.heard = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.decoding.abandon()
        self.fetching.close()

    def tell(self, publishing, segments, *, slots=("default",)):
        source = SegmentSource(self.world.store, spool=self.spool)
        self.fetching.announce(
            publishing.version, publishing.fence, segments, source=lambda: nullcontext(source), slots=slots
        )
        with self.fetching._changed:
            idle = lambda: not self.fetching._fetching and self.fetching._next() is None  # noqa: E731
            assert self.fetching._changed.wait_for(idle, timeout=10)

    def withdraw(self, publishing):
        self.fetching.withdraw(publishing.version, publishing.fence)

    def work(self, most=1000):
        """Do what there is to do; how often there was something."""
        done = 0
        while done < most:
            root = "" if self.shadow.poisoned else self.shadow.root
            if not self.decoding.due(root):
                break
            self.decoding.work(root, lambda: self.shadow)
            done += 1
        return done

    def update(self, target, weights):
        source = SegmentSource(self.world.store, spool=self.spool, ahead=self.fetching)
        early = self.decoding.hand_over()
        with capture_logs() as logs:
            done = reconcile(self.world.store, self.shadow, target, source=source, early=early)
        assert not [log for log in logs if log["event"] == "hop_failed"]
        assert done.root == self.shadow.root == target.root
        self.holds = weights
        self.stands()
        return done

    @property
    def begun(self):
        return self.decoding._hop

    def stands(self):
        """It is whole: every bit is of what it holds."""
        assert self.begun is None
        assert not self.shadow.poisoned
        assert same_bits(self.shadow.tensors, self.holds)


@pytest.fixture
def replica(world, tmp_path):
    with Replica(world, tmp_path / "spool") as replica:
        yield replica


@pytest.fixture
def decoded(monkeypatch):
    """How often frames were decoded, and how often to take them back."""
    calls = []

    def counting(*args, backward=False, **named):
        calls.append(backward)
        return decode_frame(*args, backward=backward, **named)

    monkeypatch.setattr("rl_core.delta.apply.decode_frame", counting)
    return calls


@pytest.mark.parametrize("rest", [0, 2])
def test_what_was_decoded_before_the_commit_is_not_decoded_after_it(world, replica, decoded, rest):
    told = world.next.told[: len(world.next.told) - rest]
    early = sum(len(one.frames) for one in told)
    for one in told:
        replica.tell(world.next, [one])
        replica.work()
    assert len(decoded) == early
    assert len(replica.begun.segments) == len(told)
    done = replica.update(world.next.target(), world.next.weights)
    assert decoded == [False] * len(world.next.manifest.frames)
    assert [hop.kind for hop in done.hops] == [HopKind.FORWARD]
    assert sorted(done.changed) == sorted(world.old.keys() - {"c"})
    assert done.bytes_fetched == world.next.manifest.stored_bytes
    assert done.bytes_from_spool == 0
    assert done.decode_s > 0


def test_tensors_behind_the_last_frame_are_hashed_before_the_commit(world, replica, monkeypatch):
    replica.tell(world.next, world.next.told[:-1])
    replica.work()
    leaves = {name: leaf.result() for name, leaf in replica.begun.application._leaves.items()}
    assert {"b0", "b1", "b2", "f0"} <= leaves.keys()
    expected = {entry.name: entry.leaf for entry in world.next.manifest.tensors}
    assert leaves == {name: expected[name] for name in leaves}
    after = []
    counting = lambda name, tensor: after.append(name) or leaf_hash(name, tensor)  # noqa: E731
    monkeypatch.setattr("rl_core.delta.apply.leaf_hash", counting)
    replica.update(world.next.target(), world.next.weights)
    assert sorted(after) == sorted(expected.keys() - leaves.keys())


def test_a_version_behind_which_the_target_lies_is_gone_on_with(world, replica, decoded):
    replica.tell(world.next, world.next.told)
    replica.work()
    replica.update(world.later.target(), world.later.weights)
    assert decoded == [False] * (len(world.next.manifest.frames) + len(world.later.manifest.frames))


@pytest.mark.parametrize("end", ["withdrawn", "rival", "passed", "forgotten"])
def test_what_comes_to_nothing_is_taken_back_bit_for_bit(world, replica, decoded, end):
    replica.tell(world.next, world.next.told[:4])
    replica.work()
    assert not same_bits(replica.shadow.tensors, world.old)
    if end == "withdrawn":
        replica.withdraw(world.rival)  # another attempt's word
        assert replica.work() == 0
        replica.withdraw(world.next)
    elif end == "rival":
        replica.tell(world.rival, [])
    elif end == "passed":
        replica.tell(world.later, [], slots=())
        assert replica.work() == 0  # it may have been committed
        replica.fetching.announce(VersionRef("lin", 0, 3), 0, [], source=lambda: nullcontext(None))
    else:
        for lineage in "abcdefgh":
            replica.fetching.announce(VersionRef(lineage, 0, 1), 0, [], source=lambda: nullcontext(None))
    assert replica.work() == 1
    replica.stands()
    assert decoded == [False] * (len(decoded) // 2) + [True] * (len(decoded) // 2)
    assert replica.work() == 0
    replica.update(world.side.target(), world.side.weights)


@pytest.mark.parametrize("other", ["home", "side", "rival"])
def test_another_target_takes_it_back_first(world, replica, other):
    replica.tell(world.next, world.next.told[:4])
    replica.work()
    if other == "home":
        assert replica.update(world.home(), world.old).changed == {}
        assert replica.work() == 0  # and it is not begun again
    else:
        chosen = getattr(world, other)
        replica.update(chosen.target(), chosen.weights)


def test_a_manifest_that_is_not_there_takes_it_back(world, replica):
    replica.tell(world.next, world.next.told[:4])
    replica.work()
    gone = Target(version="x:0-1", root="ab" * 32, manifest="lineages/none/manifest.json")
    with pytest.raises(ObjectMissing, match="gone"):
        replica.update(gone, world.old)
    replica.stands()


def test_a_store_that_fails_under_the_rest_takes_it_back(world, replica):
    replica.tell(world.next, world.next.told[:4])
    replica.work()

    class Failing:
        def __getattr__(self, name):
            return getattr(world.store, name)

        def get_range(self, *_, **__):
            raise StoreUnavailable("it went away")

    early = replica.decoding.hand_over()
    with pytest.raises(StoreUnavailable):
        reconcile(world.store, replica.shadow, world.next.target(), source=SegmentSource(Failing()), early=early)
    replica.stands()
    replica.update(world.next.target(), world.next.weights)


def test_an_update_that_is_interrupted_in_the_rest_takes_it_back(world, replica):
    """Its target was replaced while segments were fetched after the commit."""
    replica.tell(world.next, world.next.told[:4])
    replica.work()
    asked = []
    source = SegmentSource(world.store, interrupted=lambda: len(asked) > 2 or asked.append(1))
    with pytest.raises(Interrupted):
        reconcile(world.store, replica.shadow, world.next.target(), source=source, early=replica.decoding.hand_over())
    assert len(asked) == 3
    replica.stands()
    replica.update(world.side.target(), world.side.weights)


def test_a_version_that_was_given_up_does_not_hide_another_of_its_base(world, replica):
    told = world.next.told
    lie = next(wrong_frames(told[2].frames, told[2].segment.size))
    replica.tell(world.next, [*told[:2], msgspec.structs.replace(told[2], frames=lie)])
    assert replica.work() == 4
    replica.stands()
    replica.tell(world.side, world.side.told)
    assert replica.work() == 1 + len(world.side.told)
    assert replica.work() == 0  # and the first is not begun again
    replica.update(world.side.target(), world.side.weights)


def test_two_slots_decode_one_publication_each_for_itself(world, replica):
    other = DecodeAhead(replica.fetching, replica.spool, "candidate")
    shadow = ShadowWeights.from_tensors(world.old, version=str(OLD), manifest_key=world.snapshot.manifest_key)
    replica.tell(world.next, world.next.told, slots=("default", "candidate"))
    replica.work(4)
    while other.due("" if shadow.poisoned else shadow.root):
        other.work(shadow.root, lambda: shadow)
    replica.work()
    source = SegmentSource(world.store, spool=replica.spool, ahead=replica.fetching)
    early = other.hand_over()
    assert len(early.segments) == len(replica.begun.segments) == len(world.next.told)
    done = reconcile(world.store, shadow, world.next.target(), source=source, early=early)
    assert (done.bytes_fetched, done.root) == (world.next.manifest.stored_bytes, shadow.root)
    assert same_bits(shadow.tensors, world.next.weights)
    replica.update(world.next.target(), world.next.weights)


def test_only_slots_that_follow_and_stand_at_the_base_decode(world, replica):
    replica.tell(world.next, world.next.told, slots=("candidate",))
    assert replica.work() == 0
    replica.tell(world.next, [], slots=("candidate", "default"))
    replica.shadow.root = "ab" * 32
    assert replica.work() == 0
    replica.shadow.root = world.snapshot.root
    replica.shadow.poisoned = True
    assert replica.work() == 0
    replica.shadow.poisoned = False
    assert replica.work() == 1 + len(world.next.told)


def test_weights_of_another_form_and_unknown_codecs_wait_for_the_manifest(world, replica):
    draft = world.next.told[0].draft
    for wrong in ({"forms": "ab" * 32}, {"codec": "frames/9"}):
        told = [msgspec.structs.replace(one, draft=msgspec.structs.replace(draft, **wrong)) for one in world.next.told]
        with Replica(world, replica.folder / "another") as another:
            another.tell(world.next, told)
            another.work()
            another.stands()
            another.update(world.next.target(), world.next.weights)


def test_a_gap_ends_it_and_another_content_under_a_number_takes_it_back(world, replica):
    told = world.next.told
    replica.tell(world.next, [*told[:2], *told[3:]])
    assert replica.work() == 3
    replica.tell(world.next, told[:2])  # said again
    assert replica.work() == 0
    replica.tell(world.next, [msgspec.structs.replace(told[1], segment=told[2].segment)])
    assert replica.work() == 1
    replica.stands()


def test_another_draft_in_the_middle_takes_it_back(world, replica):
    one, two, three, *_ = world.next.told
    replica.tell(world.next, [one, two])
    assert replica.work() == 3
    draft = msgspec.structs.replace(three.draft, base_root="ab" * 32)
    replica.tell(world.next, [msgspec.structs.replace(three, draft=draft)])
    assert replica.work() == 1
    replica.stands()


def test_a_segment_that_cannot_be_read_is_not_tried_for_ever(world, replica, monkeypatch):
    replica.tell(world.next, world.next.told)
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "get", lambda *_: None)
        assert replica.work() == 2
    replica.update(world.next.target(), world.next.weights)


def wrong_frames(frames, size):
    """What a frame may not say."""
    first = frames[0]
    piece = first.ranges[0]

    def with_(**change):
        return [msgspec.structs.replace(first, **change), *frames[1:]]

    yield [*frames, msgspec.structs.replace(first, segment=0, offset=0, size=1)]
    yield with_(size=size + 1)
    yield with_(offset=-1)
    yield with_(size=0)
    yield with_(xxh3="0" * 16)
    yield with_(xxh3="")
    yield with_(ranges=[])
    for wrong in ((10_000, 0, 1), (-1, 0, 1), (0, 0, 0), (0, -1, 1), (0, 0, 1 << 40)):
        yield with_(ranges=[TensorRange(*wrong)])
    yield with_(ranges=[piece, piece])
    yield [*frames, first]
    yield with_(ranges=[TensorRange(0, 0, 1), TensorRange(1, 0, 1)])  # two dtypes


def test_announcements_are_held_to_what_a_manifest_is_held_to(world, tmp_path, caplog):
    told = world.next.told
    for number, frames in enumerate(wrong_frames(told[2].frames, told[2].segment.size)):
        lie = msgspec.structs.replace(told[2], frames=frames)
        with Replica(world, tmp_path / str(number)) as replica:
            replica.tell(world.next, [*told[:2], lie, *told[3:]])
            assert replica.work() == 4
            replica.stands()
            assert "not_decoded_ahead" in caplog.text
            assert "decode_ahead_fault" not in caplog.text
            caplog.clear()
            done = replica.update(world.next.target(), world.next.weights)
            assert [hop.kind for hop in done.hops] == [HopKind.FORWARD]


def test_what_does_not_read_or_is_not_what_the_manifest_says_is_taken_back(world, tmp_path, decoded):
    told = world.next.told
    frame = told[2].frames[0]
    flipped = msgspec.structs.replace(frame, changes=frame.changes + 1)
    for number, changed in enumerate((flipped, msgspec.structs.replace(frame, mode="raw"))):
        lie = msgspec.structs.replace(told[2], frames=[changed, *told[2].frames[1:]])
        with Replica(world, tmp_path / str(number)) as replica:
            replica.tell(world.next, [*told[:2], lie])
            replica.work()
            assert (replica.begun is None) == (number == 1)
            decoded.clear()
            done = replica.update(world.next.target(), world.next.weights)
            assert [hop.kind for hop in done.hops] == [HopKind.FORWARD]
            assert decoded.count(False) == len(world.next.manifest.frames)
            assert (True in decoded) == (number == 0)


def test_a_fault_in_one_frame_takes_back_those_beside_it(world, replica, monkeypatch):
    """Not only damage: memory may run out."""
    told = world.next.told
    replica.tell(world.next, told[:2])
    replica.work(2)
    first = told[1].frames[0].xxh3
    assert len(told[1].frames) > 1

    def failing(mode, payload, **named):
        if xxhash.xxh3_64_hexdigest(payload) == first and not named["backward"]:
            raise MemoryError
        return decode_frame(mode, payload, **named)

    monkeypatch.setattr("rl_core.delta.apply.decode_frame", failing)
    replica.work()
    replica.stands()


def test_memory_that_changed_by_itself_is_told_of_though_it_was_decoded_ahead(world, replica):
    replica.tell(world.next, world.next.told)
    replica.work()
    replica.shadow.tensors["c"][7] += 1
    target = world.rival.target(snapshot=world.snapshot.manifest_key)
    with pytest.raises(DigestMismatch, match="by themselves"):
        reconcile(world.store, replica.shadow, target, early=replica.decoding.hand_over())
    assert replica.shadow.damaged


def test_what_could_not_be_taken_back_is_not_decoded_ahead(world, replica, monkeypatch):
    monkeypatch.setattr("rl_core.delta.apply.FRAME_BYTES", 100_000)
    assert not all(frame.mode.sparse for frame in world.whole.manifest.frames)
    replica.tell(world.whole, world.whole.told)
    replica.work()
    assert 0 < len(replica.begun.segments) < len(world.whole.told)
    replica.withdraw(world.whole)
    replica.work()
    replica.stands()


def test_a_segment_that_left_the_spool_is_fetched_again(world, replica):
    replica.tell(world.next, world.next.told)
    replica.work(most=3)
    (replica.folder / world.next.told[2].segment.blake3).write_bytes(b"damaged")
    replica.work()
    assert len(replica.begun.segments) == 2
    replica.update(world.next.target(), world.next.weights)


OPS = st.one_of(
    st.tuples(st.just("tell"), st.sampled_from(["next", "next", "rival", "side", "whole", "later"]), st.integers(1, 9)),
    st.tuples(st.just("work"), st.integers(1, 6)),
    st.tuples(st.just("withdraw"), st.sampled_from(["next", "rival", "side", "whole", "later"])),
    st.tuples(st.just("target"), st.sampled_from(["next", "rival", "side", "whole", "later", "home"])),
    st.tuples(st.just("kill")),
    st.tuples(st.just("lie"), st.sampled_from(["next", "rival", "side"]), st.integers(0, 1 << 30)),
    st.tuples(st.just("spoil"), st.integers(0, 1 << 30)),
)


@given(ops=st.lists(OPS, max_size=14), last=st.sampled_from(["next", "rival", "side", "whole", "later", "home"]))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_it_comes_to_its_target_or_stays_what_it_was(world, ops, last):
    with tempfile.TemporaryDirectory() as folder:
        life = Life(world, Path(folder))
        try:
            for name, *arguments in [*ops, ("target", last)]:
                getattr(life, name)(*arguments)
        finally:
            life.replica.__exit__()


class Life:
    """A replica to which things happen; whatever it was told it is whole when nothing is begun."""

    def __init__(self, world, folder):
        self.world, self.folder = world, folder
        self.kill()

    def tell(self, name, count):
        one, at = getattr(self.world, name), self.told.get(name, 0)
        self.replica.tell(one, one.told[at : at + count])
        self.told[name] = at + count

    def lie(self, name, seed):
        one, at = getattr(self.world, name), self.told.get(name, 0)
        if at < len(one.told):
            lies = list(wrong_frames(one.told[at].frames, one.told[at].segment.size))
            self.replica.tell(one, [msgspec.structs.replace(one.told[at], frames=lies[seed % len(lies)])])
            self.told[name] = at + 1

    def work(self, count):
        self.replica.work(count)
        self.check()

    def withdraw(self, name):
        one = getattr(self.world, name)
        self.replica.withdraw(one)
        self.told.pop(name, None)
        self.replica.work()
        self.check()
        begun = self.replica.begun and self.replica.begun.publication
        assert begun is None or (begun.version, begun.fence) != (one.version, one.fence)

    def target(self, name):
        if name == "home":
            self.replica.update(self.world.home(), self.world.old)
        else:
            chosen = getattr(self.world, name)
            self.replica.update(chosen.target(self.world.snapshot.manifest_key), chosen.weights)

    def kill(self):
        if hasattr(self, "replica"):
            self.replica.__exit__()
        self.replica, self.told = Replica(self.world, self.folder), {}

    def spoil(self, seed):
        files = sorted(self.folder.iterdir())
        if files:
            chosen = random.Random(seed).choice(files)
            data = bytearray(chosen.read_bytes())
            data[seed % len(data)] ^= 1
            chosen.unlink()  # what was mapped before stays what it was
            chosen.write_bytes(data)

    def check(self):
        if self.replica.begun is None:
            self.replica.stands()
        else:
            assert self.replica.shadow.poisoned
