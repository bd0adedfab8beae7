"""A slot says what it serves, whatever went wrong on the way there, and turns back when it is called back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import engine_factories as make
import pytest
import torch

from rl_core.delta import Base, publish_delta, publish_snapshot, read_manifest, weights_root
from rl_core.delta.apply import HopApplication
from rl_core.delta.publisher import Published
from rl_core.engines.engine import Engine
from rl_core.engines.protocol import SlotState, SlotStatus, TargetBody
from rl_core.engines.reconciler import SlotReconciler
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import ObjectStore, open_store
from rl_core.types import VersionRef

Weights = dict[str, torch.Tensor]


@dataclass
class Slot:
    """A slot of an engine, and a chain of versions that grows. `weights[n]` are version 0-n's."""

    store: ObjectStore
    engine: Engine
    reconciler: SlotReconciler
    weights: list[Weights]
    published: list[Published] = field(default_factory=list)

    def publish(self, new: Weights) -> Published:
        number, last = len(self.weights), self.published[-1]
        base = Base(f"line:0-{number - 1}", last.root, last.manifest_key)
        version = VersionRef("line", 0, number)
        made = publish_delta(self.store, old=self.weights[-1], new=new, version=version, base=base, fence=1)
        self.weights.append(new)
        self.published.append(made)
        return made

    def target(self, number: int, *, seconds: float | None = None) -> TargetBody:
        """A target, with a limit at which its bytes take about so long."""
        made = self.published[number]
        limit = made.bytes / seconds if seconds else None
        return TargetBody(version=f"line:0-{number}", root=made.root, manifest=made.manifest_key, limit_bytes_s=limit)

    def settle(self, number: int) -> SlotStatus:
        self.reconciler.set_target(self.target(number))
        make.wait_until(lambda: self.reconciler.status().state is not SlotState.RECONCILING)
        return self.reconciler.status()

    @property
    def fetching(self) -> bool:
        progress = self.reconciler.status().progress
        return progress is not None and progress.total_bytes > 0

    @property
    def held(self) -> str:
        return weights_root(self.engine.tensors())


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    folder = make.make_model_folder(tmp_path / "tiny")
    store = open_store((tmp_path / "store").as_uri())
    weights = read_checkpoint(folder)
    whole = publish_snapshot(store, weights, key_prefix="snapshots/line/0-0/0", version=VersionRef("line", 0, 0))
    engine = make.make_engine(folder)
    made = Slot(store, engine, SlotReconciler(engine, "default", store=store), [weights], [whole])
    made.settle(0)
    yield made
    made.reconciler.close()
    engine.close()


def moved(weights: Weights, *, every: int = 1) -> Weights:
    return {name: tensor + 0.01 if n % every == 0 else tensor for n, (name, tensor) in enumerate(weights.items())}


def test_weights_that_did_not_go_in_are_not_said_to_serve(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any fault: torch says RuntimeError when there is no memory left. What stayed out goes in with the next."""
    slot.publish(moved(slot.weights[0], every=2))
    stage, faults = slot.engine.stage, [RuntimeError("DefaultCPUAllocator: can't allocate memory")]

    def once(*args: object, **named: object) -> object:
        if faults:
            raise faults.pop()
        return stage(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(slot.engine, "stage", once)
    failed = slot.settle(1)
    assert (failed.version, failed.root, failed.error_code) == ("line:0-0", slot.published[0].root, "engine_error")
    assert slot.held == slot.published[0].root
    status = slot.settle(1)
    assert (status.version, status.error, slot.held) == ("line:0-1", None, slot.published[1].root)
    slot.publish(moved(slot.weights[1], every=3))
    assert (slot.settle(2).version, slot.held) == ("line:0-2", slot.published[2].root)


def test_called_back_a_slot_leaves_the_version_it_was_fetching(slot: Slot) -> None:
    slot.publish(moved(slot.weights[0]))
    slot.reconciler.set_target(slot.target(1, seconds=600))
    make.wait_until(lambda: slot.fetching)
    status = slot.settle(0)
    assert (status.version, status.error, slot.held) == ("line:0-0", None, slot.published[0].root)
    assert slot.settle(1).version == "line:0-1"
    assert slot.held == slot.published[1].root


def test_a_later_version_waits_for_the_one_before_it(slot: Slot) -> None:
    """Over a link on which each version takes longer than the next needs to come, a replica still arrives."""
    slot.publish(moved(slot.weights[0]))
    slot.publish(moved(slot.weights[1]))
    seen = set()
    slot.reconciler.set_target(slot.target(1, seconds=1.0))
    make.wait_until(lambda: slot.fetching)
    slot.reconciler.set_target(slot.target(2, seconds=1.0))

    def arrived() -> bool:
        seen.add(slot.reconciler.status().version)
        return "line:0-2" in seen

    make.wait_until(arrived)
    assert "line:0-1" in seen


def test_closing_does_not_wait_for_a_fetch(slot: Slot) -> None:
    slot.publish(moved(slot.weights[0]))
    slot.reconciler.set_target(slot.target(1, seconds=600))
    make.wait_until(lambda: slot.fetching)
    slot.reconciler.close()
    assert (slot.reconciler.status().version, slot.held) == ("line:0-0", slot.published[0].root)


@pytest.mark.parametrize("change", ["gone", "wider", "more"])
def test_weights_of_another_form_are_refused(slot: Slot, change: str) -> None:
    name = sorted(slot.weights[0])[-1]
    new = dict(slot.weights[0])
    tensor = new.pop(name)
    if change == "wider":
        new[name] = tensor.double() + 1e-12
    if change == "more":
        name, new = "zz.extra", {**slot.weights[0], "zz.extra": torch.ones(3)}
    slot.publish(new)
    for _ in range(2):  # the second time the shadow is there already
        status = slot.settle(1)
        assert (status.version, status.root, status.error_code) == ("line:0-0", slot.published[0].root, "model_invalid")
        assert name in (status.error or "")
    assert slot.held == slot.published[0].root
    slot.publish(moved(slot.weights[0], every=2))  # what comes after is served
    status = slot.settle(2)
    assert (status.version, status.error, slot.held) == ("line:0-2", None, slot.published[2].root)


def test_a_target_that_failed_holds_no_weights(slot: Slot) -> None:
    """An error is kept until the next target; what it passed on its way is not."""
    slot.publish(moved(slot.weights[0]))
    segment = read_manifest(slot.store, slot.published[1].manifest_key).segments[0]
    slot.store.delete(segment.key)
    assert slot.settle(1).error_code == "object_missing"
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is HopApplication]
