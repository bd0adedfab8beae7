"""After ten deltas vLLM is, bit for bit, a vLLM that was started on the exported checkpoint: dense and mixture."""

from __future__ import annotations

import asyncio
from pathlib import Path

import vllm_rig as rig
from vllm_bench import Bench

from rl_core.types import Generated


async def test_ten_deltas_give_what_a_fresh_engine_gives(tmp_path: Path, bench: Bench):
    swapped = rig.sidecar(bench.trained.folder, tmp_path, bench.trained)
    with rig.ending(swapped):
        rig.same(await after_ten_deltas(swapped, bench.trained, routed=False), bench.fresh)
        assert await asyncio.to_thread(swapped.stop) == 0


async def test_ten_deltas_of_a_mixture_give_what_a_fresh_engine_gives_with_its_routes(tmp_path: Path):
    line = rig.Line(rig.model_folder(tmp_path / "base", routed=True), tmp_path / "store")
    line.ten_deltas()
    # A checkpoint names its experts one by one, however they are held in memory.
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in line.tensors
    exported = line.export(tmp_path / "exported")
    # Both start at once.
    swapped = rig.sidecar(line.folder, tmp_path / "swapped", line, "--routes")
    fresh = rig.sidecar(exported, tmp_path / "fresh", line, "--routes")
    with rig.ending(swapped, fresh):
        last = await after_ten_deltas(swapped, line, routed=True)
        await asyncio.to_thread(fresh.wait_attached)
        rig.same(last, await rig.batch(fresh, routes=True))
    check_routes(last)


async def after_ten_deltas(swapped: rig.Sidecar, line: rig.Line, *, routed: bool) -> list[Generated]:
    """What a vLLM that took ten versions, one by one, answers under the last."""
    await asyncio.to_thread(swapped.wait_attached)
    assert swapped.status().version is None
    assert swapped.status().root == line.versions[0].root
    first = await rig.batch(swapped, routes=routed)
    assert {result.spans[0].version for result in first} == {""}
    again = await rig.batch(swapped, routes=routed)
    # Keys and values are reused between swaps, where routes need not be recorded, and never across one.
    assert (max(result.cached_tokens for result in again) > 0) is not routed
    for version in line.versions[1:]:
        status = await asyncio.to_thread(swapped.serve, version)
        assert status.update is not None
        assert status.update.pause_s > 0
    last = await rig.batch(swapped, routes=routed)
    assert max(result.cached_tokens for result in last) == 0
    metrics = swapped.metrics()
    assert metrics["swaps_total"] == 10
    assert metrics["shadow_bytes"] == sum(t.numel() * t.element_size() for t in line.tensors.values())
    assert f"shadow_bytes={int(metrics['shadow_bytes'])}" in swapped.told()
    # The other of the two copies of the model that change places serves the same version now.
    for place in (9, 8, 10):
        await asyncio.to_thread(swapped.serve, line.versions[place])
    rig.same(await rig.batch(swapped, routes=routed), last)
    backwards = await asyncio.to_thread(swapped.serve, line.versions[1])
    assert backwards.update is not None
    assert backwards.update.hops == 9
    assert [result.token_ids for result in last] != [result.token_ids for result in first]
    assert {span.version for result in last for span in result.spans} == {line.versions[10].name}
    return last


def check_routes(results: list) -> None:
    for result in results:
        routes = result.routes
        assert routes is not None
        assert (routes.tokens, routes.layers, routes.top_k) == (result.prompt_tokens + len(result.token_ids) - 1, 2, 2)
        pairs = list(zip(routes.data[::2], routes.data[1::2], strict=True))
        assert all(one != other and max(one, other) < 4 for one, other in pairs)
        assert len(set(pairs)) > 4
