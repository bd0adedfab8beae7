"""The sidecar's `--update-threads` is how many threads a worker decodes and hashes on."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import engine_factories as make
import msgspec
import pytest
import torch
from engine_process import command
from vllm_rig import Line, model_folder

from rl_core.engines.protocol import TargetBody
from rl_core.engines.vllm.__main__ import _parser, _source
from rl_core.engines.vllm.messages import WorkerState
from rl_core.engines.vllm.transfer import DeltaTransferEngine, StoreInfo
from tests.thread_pools import watch


def test_a_worker_decodes_and_hashes_on_that_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pools, line = watch(monkeypatch), Line(model_folder(tmp_path / "tiny", routed=False), tmp_path / "store")
    version = line.publish({"model.norm.weight": line.tensors["model.norm.weight"] + 1})
    flags = command(line.folder, tmp_path, program=(), port=1, control_port=2, **{"update-threads": 3})
    source = _source(_parser().parse_args(flags[1:]))
    engine = DeltaTransferEngine(MagicMock(), MagicMock(), torch.device("cpu"), torch.nn.Module())
    engine.init_transfer_engine(StoreInfo(**msgspec.to_builtins(source)))
    first = line.versions[0].manifest
    engine.prepare(TargetBody(version=version.name, root=version.root, manifest=version.manifest, snapshot=first))
    make.wait_until(lambda: engine.state is not WorkerState.PREPARING)
    assert (engine.state, engine.error) == (WorkerState.STAGED, None)
    assert pools == {"leaves": [3], "decode": [3], "hash": [3]}
