"""A slot decodes a version while it is published, and says and serves the one before until that is its target."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engine_factories as make
import msgspec
import pytest
import torch

from rl_core.delta import Base, publish_delta, publish_snapshot, weights_root
from rl_core.delta.apply import decode_frame
from rl_core.delta.frames import plan_frames
from rl_core.delta.manifest import StandingSegment
from rl_core.delta.publisher import Published
from rl_core.engines.protocol import AnnounceBody, SlotState, SlotStatus, StandingRef, TargetBody
from rl_core.engines.reconciler import SlotReconciler
from rl_core.engines.sharing import SegmentSharing
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from rl_core.types import VersionRef

Weights = dict[str, torch.Tensor]
SLOTS = ("default", "candidate")


class Rig:
    """An engine of two slots and a base; `publish` makes versions of it and tells of their segments."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.store = open_store((tmp_path / "store").as_uri())
        self.weights = read_checkpoint(folder)
        self.base = publish_snapshot(
            self.store, self.weights, key_prefix="snapshots/x", version=VersionRef("line", 0, 0)
        )
        self.engine = make.make_engine(folder, slots=SLOTS)
        self.sharing = SegmentSharing(tmp_path / "spool")
        self.slots = {slot: SlotReconciler(self.engine, slot, store=self.store, sharing=self.sharing) for slot in SLOTS}
        self.fence = 0

    def publish(self, seed: int, *, told: list[StandingSegment], follow: bool = True) -> TargetBody:
        """Version 0-1 of an attempt of its own."""
        self.fence += 1
        new = {**self.weights, **make.perturbed(self.weights, seed=seed)}
        base = Base("line:0-0", self.base.root, self.base.manifest_key)

        def stands(one: StandingSegment) -> None:
            told.append(one)
            if follow:
                self.tell([one])

        made = publish_delta(
            self.store, old=self.weights, new=new, version=VersionRef("line", 0, 1), base=base, fence=self.fence,
            on_segment=stands,
        )  # fmt: skip
        return self.target(made, "line:0-1")

    def target(self, made: Published, version: str, **more: Any) -> TargetBody:
        snapshot = self.base.manifest_key
        return TargetBody(version=version, root=made.root, manifest=made.manifest_key, snapshot=snapshot, **more)

    def tell(self, told: list[StandingSegment], **more: Any) -> None:
        segments = [msgspec.convert(msgspec.to_builtins(one), type=StandingRef) for one in told]
        body = AnnounceBody(version="line:0-1", fence=self.fence, segments=segments, slots=["default"], **more)
        self.sharing.announce(self.store, body)

    def decoded(self, slot: str = "default") -> int:
        """Segments of what is begun."""
        ahead = self.slots[slot]._ahead
        assert ahead is not None
        return len(ahead._hop.segments) if ahead._hop is not None else 0

    def settle(self, target: TargetBody, slot: str = "default") -> SlotStatus:
        self.slots[slot].set_target(target)
        make.wait_until(lambda: self.slots[slot].status().state is not SlotState.RECONCILING)
        return self.slots[slot].status()

    def serves(self, made: TargetBody | Published, slot: str = "default") -> bool:
        """What the slot says, and what it generates from."""
        status = self.slots[slot].status()
        said = (status.root, status.state, status.error)
        return said == (made.root, SlotState.READY, None) and weights_root(self.engine.tensors(slot)) == made.root

    def idle(self) -> None:
        """Nothing is fetched, decoded or taken back any more."""
        ahead = self.sharing.ahead

        def quiet() -> bool:
            with ahead._changed:
                if ahead._fetching or ahead._next() is not None:
                    return False
            return not any(slot._ahead and slot._ahead.due(slot._shadow_root) for slot in self.slots.values())

        make.wait_until(quiet)
        if not self.decoded():
            make.wait_until(lambda: not self.poisoned)

    @property
    def poisoned(self) -> bool:
        shadow = self.slots["default"]._shadow
        return shadow is not None and shadow.poisoned

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()
        self.sharing.ahead.close()
        self.engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.make_model_folder(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def rig(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 32 << 10)
    monkeypatch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=16 << 10))
    made = Rig(folder, tmp_path)
    yield made
    made.close()


def test_all_is_decoded_when_the_version_is_committed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a fresh engine on, whose copy of the weights is not made yet."""
    frames: list[bool] = []

    def counting(*arguments: Any, **named: Any) -> Any:
        frames.append(named["backward"])
        return decode_frame(*arguments, **named)

    monkeypatch.setattr("rl_core.delta.apply.decode_frame", counting)
    told: list[StandingSegment] = []
    target = rig.publish(1, told=told)
    make.wait_until(lambda: rig.decoded() == len(told))
    assert len(told) > 3
    assert rig.decoded("candidate") == 0  # which does not follow
    for slot in SLOTS:
        assert rig.serves(rig.base, slot)
    assert frames == [False] * sum(len(one.frames) for one in told)
    before = len(frames)
    status = rig.settle(target)
    assert len(frames) == before
    assert rig.serves(target)
    assert status.version == "line:0-1"
    assert status.update is not None
    assert (status.update.hops, status.update.decode_s > 0) == (1, True)
    assert status.update.bytes_fetched == sum(one.segment.size for one in told)
    assert rig.settle(target, "candidate").error is None
    assert rig.serves(target, "candidate")


def test_until_there_is_a_target_nothing_of_it_is_said_or_served(rig: Rig) -> None:
    told: list[StandingSegment] = []
    rig.publish(1, told=told)
    make.wait_until(lambda: rig.decoded() == len(told))
    assert rig.serves(rig.base)
    rig.tell([], withdrawn=True)
    rig.idle()
    assert rig.decoded() == 0
    assert rig.serves(rig.base)
    shadow = rig.slots["default"]._shadow
    assert shadow is not None
    assert weights_root(shadow.tensors) == rig.base.root


@pytest.mark.parametrize("other", ["repair", "base", "rival"])
def test_another_target_is_come_to_from_the_middle(rig: Rig, other: str) -> None:
    target = rig.publish(2, told=[], follow=False)
    told: list[StandingSegment] = []
    rig.publish(1, told=told)
    make.wait_until(lambda: rig.decoded() == len(told))
    if other != "rival":
        target = rig.target(rig.base, "line:0-0", repair=other == "repair")
    status = rig.settle(target)
    assert status.version == target.version
    assert rig.serves(target)
    assert rig.decoded() == 0


def test_a_fault_in_it_ends_it_and_not_the_slot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fault:
        def __init__(self, *_: object, **__: object) -> None:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("rl_core.delta.early.EarlyHop", Fault)
        target = rig.publish(1, told=[])
        rig.idle()
    assert rig.serves(rig.base)
    rig.settle(target)
    assert rig.serves(target)


def test_a_spool_that_fails_ends_it_and_not_the_slot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def failing(*_: object) -> bool:
        asked.set()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("rl_core.delta.early.DecodeAhead.due", failing)
        target = rig.publish(1, told=[])
        assert asked.wait(10)
    rig.settle(target)
    assert rig.serves(target)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_while_it_is_decoded_the_target_is_served(rig: Rig, seed: int) -> None:
    generator = random.Random(seed)
    told: list[list[StandingSegment]] = [[], []]
    targets = [rig.publish(number, told=told[number], follow=False) for number in range(2)]
    targets.append(rig.target(rig.base, "line:0-0"))
    for _ in range(generator.randrange(2, 12)):
        act = generator.choice(["tell", "tell", "tell", "withdraw", "target", "idle"])
        which = generator.randrange(2)
        rig.fence = which + 1
        if act == "tell":
            rig.tell(told[which][: generator.randrange(1, len(told[which]) + 1)])
        elif act == "withdraw":
            rig.tell([], withdrawn=True)
        elif act == "target":
            rig.slots["default"].set_target(generator.choice(targets))
        else:
            rig.idle()
    last = generator.choice(targets)
    rig.settle(last)
    rig.idle()
    assert rig.serves(last)
