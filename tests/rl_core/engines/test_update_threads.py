"""`--update-threads` is how many decode and hash, ahead of a target and for one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import engine_factories as make
import msgspec
import pytest
from engine_process import command, free_ports

from rl_core.delta import Base, publish_delta, publish_snapshot
from rl_core.delta.manifest import StandingSegment
from rl_core.engines.__main__ import main
from rl_core.engines.protocol import AnnounceBody, SlotState, StandingRef, TargetBody
from rl_core.engines.server import EngineServer
from rl_core.engines.vllm import __main__ as vllm
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from rl_core.types import VersionRef
from tests.thread_pools import watch


def flags(folder: Path, tmp_path: Path, **more: object) -> list[str]:
    port, control_port = free_ports(2)
    named = {"spool": tmp_path / "spool", **more}
    return command(folder, tmp_path, program=(), port=port, control_port=control_port, **named)[1:]


def test_an_engine_decodes_and_hashes_on_that_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = watch(monkeypatch)
    folder = make.make_model_folder(tmp_path / "tiny")
    store, old = open_store((tmp_path / "store").as_uri()), read_checkpoint(folder)
    whole = publish_snapshot(store, old, key_prefix="snapshots/x", version=VersionRef("line", 0, 0))
    base, told = Base("line:0-0", whole.root, whole.manifest_key), list[StandingSegment]()
    new = {**old, **make.perturbed(old, seed=1)}
    made = publish_delta(
        store, old=old, new=new, version=VersionRef("line", 0, 1), base=base, fence=0, on_segment=told.append
    )
    targets = [
        TargetBody(version=version, root=one.root, manifest=one.manifest_key, snapshot=whole.manifest_key)
        for version, one in (("line:0-1", made), ("line:0-0", whole))
    ]

    async def drive(server: EngineServer, *_: object) -> None:
        slot = server._reconcilers["default"]
        assert server._sharing is not None
        assert slot._ahead is not None
        server._sharing.announce(store, announced(told))
        make.wait_until(lambda: pools["decode"] == [3])  # nobody gave it a target yet
        for target in targets:
            slot.set_target(target)
            make.wait_until(lambda: slot.status().state is not SlotState.RECONCILING)
            assert slot.status().root == target.root
        server.close()

    monkeypatch.setattr("rl_core.engines.server.serve", drive)
    assert main(flags(folder, tmp_path, **{"update-threads": 3})) == 0
    assert pools == {"leaves": [3, 3], "decode": [3, 3], "hash": [3, 3]}  # the engine's weights, the shadow; two hops


def announced(told: Iterable[StandingSegment]) -> AnnounceBody:
    segments = [msgspec.convert(msgspec.to_builtins(one), type=StandingRef) for one in told]
    return AnnounceBody(version="line:0-1", fence=0, segments=segments, slots=["default"])


@pytest.mark.parametrize(("more", "threads"), [({}, 1), ({"update-threads": 3}, 3)])
def test_the_sidecar_tells_its_workers(tmp_path: Path, more: dict[str, Any], threads: int) -> None:
    source = vllm._source(vllm._parser().parse_args(flags(tmp_path / "tiny", tmp_path / "state", **more)))
    assert source is not None
    assert source.update_threads == threads
