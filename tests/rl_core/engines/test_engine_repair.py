"""A repair believes nothing that a replica holds: weights that changed under its hands come back from a snapshot."""

from __future__ import annotations

from pathlib import Path

import engine_factories as make
import msgspec
import torch

from rl_core.delta import publish_snapshot, weights_root
from rl_core.engines.protocol import SlotState, TargetBody
from rl_core.engines.reconciler import SlotReconciler
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from rl_core.types import VersionRef

VERSION = VersionRef("line", 0, 0)


def test_a_repair_replaces_weights_that_changed_unseen(tmp_path: Path) -> None:
    folder = make.make_model_folder(tmp_path / "tiny")
    store = open_store((tmp_path / "store").as_uri())
    tensors = read_checkpoint(folder)
    whole = publish_snapshot(store, tensors, key_prefix="snapshots/line/0-0/0", version=VERSION)
    engine = make.make_engine(folder)
    reconciler = SlotReconciler(engine, "default", store=store)
    target = TargetBody(version=str(VERSION), root=whole.root, manifest=whole.manifest_key, snapshot=whole.manifest_key)
    settle(reconciler, target)
    with torch.inference_mode():
        engine.tensors()["model.norm.weight"].add_(1.0)  # a bit flips in memory: nobody is told
    assert reconciler.status().root == whole.root

    settle(reconciler, target)
    assert weights_root(engine.tensors()) != whole.root  # what it believes to hold, it does not fetch again
    settle(reconciler, msgspec.structs.replace(target, repair=True))
    assert weights_root(engine.tensors()) == whole.root
    status = reconciler.status()
    assert (status.state, status.error, status.version) == (SlotState.READY, None, str(VERSION))
    assert status.update is not None
    assert status.update.changed_tensors == len(tensors)
    reconciler.close()
    engine.close()


def settle(reconciler: SlotReconciler, target: TargetBody) -> None:
    reconciler.set_target(target)
    make.wait_until(lambda: reconciler.status().state is not SlotState.RECONCILING)
