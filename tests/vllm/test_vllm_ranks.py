"""A vLLM of two tensor-parallel ranks: each fetches by itself, and they generate when all hold one version."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import vllm_rig as rig
from vllm_bench import Bench

from rl_core.delta import read_manifest
from rl_core.engines.protocol import SlotState, TargetBody
from rl_core.engines.vllm.messages import WorkerState, WorkerStatus
from rl_core.engines.vllm.transfer import DeltaTransferEngine
from rl_core.engines.vllm.upstream import VllmControl
from rl_core.errors import EngineUnreachable

TWO = "--tensor-parallel-size=2"


@dataclass
class Ranks:
    """`fresh` is a vLLM on the exported checkpoint; `swapped` is one on the base, whose updates go into twins.

    `refused` is what a request met before the first rank of `fresh` had a spool.
    """

    fresh: Bench
    swapped: rig.Sidecar
    refused: str

    def workers(self) -> list[WorkerStatus]:
        """What each rank of `fresh` says itself."""
        vllm = VllmControl(self.fresh.url)
        try:
            return vllm.workers()
        finally:
            vllm.close()

    def both_serve(self, version: rig.Version, token: int) -> None:
        self.fresh.serves(version, token)
        told = [(worker.version, worker.root, worker.damaged) for worker in self.workers()]
        assert told == [(version.name, version.root, False)] * 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Both start at once."""
    folder = tmp_path_factory.mktemp("ranks")
    fresh = Bench(folder / "fresh", TWO)
    fresh.start_vllm()
    swapped = rig.sidecar(fresh.trained.folder, folder / "swapped", fresh.trained, f"--vllm-arg={TWO}")
    spool = folder / "spool"
    spool.mkdir()
    (spool / "rank-0").write_text("no folder")
    fresh.start_sidecar("--spool", str(spool))
    try:
        rig.wait_until(lambda: "spool folder" in refusal(fresh), timeout_s=rig.START_S, every_s=0.2)
        refused = refusal(fresh)
        (spool / "rank-0").unlink()
        fresh.sidecar.wait_attached()
        fresh.fresh = asyncio.run(rig.batch(fresh.sidecar))
        swapped.wait_attached()
        yield Ranks(fresh, swapped, refused)
    finally:
        fresh.end()
        with rig.ending(swapped):
            pass


def refusal(bench: Bench) -> str:
    """What a request is refused with by an engine that is not attached."""
    with pytest.raises(EngineUnreachable) as refused:
        asyncio.run(bench.tokens())
    return str(refused.value)


def test_deltas_give_two_ranks_what_fresh_ranks_give(ranks: Ranks):
    fresh, line = ranks.fresh, ranks.fresh.trained
    first = asyncio.run(rig.batch(ranks.swapped))
    for version in line.versions[1:]:
        ranks.swapped.serve(version)
    rig.same(asyncio.run(rig.batch(ranks.swapped)), fresh.fresh)
    metrics, whole = ranks.swapped.metrics(), sum(t.numel() * t.element_size() for t in line.tensors.values())
    assert (metrics["workers"], metrics["shadow_bytes"]) == (2, 2 * whole)
    # The other way, into the models that generate.
    back = fresh.line.publish(rig.read_checkpoint(line.folder))
    fresh.sidecar.serve(back)
    again = asyncio.run(rig.batch(fresh.sidecar))
    rig.same(again, first)
    assert [result.token_ids for result in first] != [result.token_ids for result in fresh.fresh]
    workers = ranks.workers()
    assert [(worker.version, worker.root) for worker in workers] == [(back.name, line.versions[0].root)] * 2
    delta = read_manifest(fresh.line.store, back.manifest)
    assert [worker.update.bytes_fetched for worker in workers] == [sum(one.size for one in delta.segments)] * 2


def test_a_rank_that_has_no_spool_says_so_and_the_others_answers_stay_theirs(ranks: Ranks):
    assert "cannot use the spool folder" in ranks.refused
    version = ranks.fresh.sign(90)
    ranks.fresh.sidecar.serve(version)
    ranks.both_serve(version, 90)


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_meets_leaves_all_at_the_old_version(ranks: Ranks, rank: int):
    bench, token = ranks.fresh, 100 + 10 * rank  # segments that were fetched once are in the spools
    good = bench.sign(token)
    bench.sidecar.serve(good)
    missed = bench.sign(token + 1)
    damaged = bench.state / f"damaged-{rank}"
    shutil.copytree(bench.state / "store", damaged)
    segments = read_manifest(bench.line.store, missed.manifest).segments
    victim = damaged / max(segments, key=lambda segment: segment.size).key
    kept = victim.read_bytes()
    victim.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    bench.ask_worker("slipway_use_store", damaged.as_uri(), rank=rank)
    assert bench.sidecar.target(missed).error_code == "digest_mismatch"
    states = [worker.state for worker in ranks.workers()]
    assert (states.pop(rank), states) == (WorkerState.FAILED, [WorkerState.STAGED])
    ranks.both_serve(good, token)
    bench.ask_worker("slipway_use_store", bench.line.url, rank=rank)
    later = bench.sign(token + 2)
    bench.sidecar.serve(later)
    ranks.both_serve(later, token + 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_which_one_broke_off_answer_only_when_all_hold_one_version(ranks: Ranks, rank: int):
    bench = ranks.fresh
    bench.ask_worker("slipway_break_loads", "1", rank=rank)
    whole = bench.sign(94)
    bench.sidecar.serve(whole)
    ranks.both_serve(whole, 94)
    bench.ask_worker("slipway_break_loads", "2", rank=rank)
    assert bench.sidecar.target(bench.sign(95)).state is SlotState.POISONED
    assert "holds a part of an update" in refusal(bench)
    repaired = bench.sign(96)
    bench.sidecar.serve(repaired)
    ranks.both_serve(repaired, 96)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_differ_when_the_sidecar_is_killed_are_found_so_by_the_next(ranks: Ranks, rank: int):
    bench = ranks.fresh
    bench.sidecar.serve(bench.sign(97))
    gate = bench.hold_load(bench.sign(98), then="break", rank=rank)
    bench.sidecar.kill()
    gate.unlink()
    bench.attach()
    assert bench.sidecar.status().state is SlotState.POISONED
    assert "holds a part of an update" in refusal(bench)
    last = bench.line.versions[-1]
    bench.sidecar.serve(last)
    ranks.both_serve(last, 98)


def test_a_worker_without_a_store_tells_it_and_raises_nothing():
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = DeltaTransferEngine(None, config, torch.device("cpu"), torch.nn.Module())
    engine.prepare(TargetBody(version="a:0-1", root="", manifest="a/manifest.json"))
    assert engine.state is WorkerState.FAILED
    assert "has no store" in str(engine.error)
