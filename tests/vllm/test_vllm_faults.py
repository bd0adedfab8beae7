"""Bad targets, a store that fails, memory that breaks, loads that break off. Nothing half-applied answers."""

from __future__ import annotations

import asyncio

import pytest
import torch
import vllm_rig as rig
from vllm_bench import Bench

from rl_core.delta import Base, publish_delta, read_manifest, weights_root
from rl_core.engines.protocol import SlotState
from rl_core.errors import EngineError, EngineUnreachable
from rl_core.types import Generated, VersionRef


def test_a_target_that_cannot_be_is_refused_and_the_old_version_serves(bench: Bench):
    good = bench.sign(51)
    bench.sidecar.serve(good)
    old = {**bench.base, **rig.stepped(bench.base, seed=7)}
    foreign = rig.Version(VersionRef("stranger", 0, 1), "", "")
    nowhere = Base("stranger:0-0", weights_root(old), "lineages/stranger/0-0/0/manifest.json")
    made = publish_delta(
        bench.line.store, old=old, new={**old, **rig.stepped(old, seed=8)}, version=foreign.ref, base=nowhere, fence=0
    )
    foreign.root, foreign.manifest = made.root, made.manifest_key
    assert bench.sidecar.target(foreign).error_code == "base_mismatch"
    bench.serves(good, 51)

    flipped = bench.sign(52)
    segments = read_manifest(bench.line.store, flipped.manifest).segments
    victim = bench.state / "store" / max(segments, key=lambda segment: segment.size).key
    kept = victim.read_bytes()
    victim.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert bench.sidecar.target(flipped).error_code == "digest_mismatch"
    bench.serves(good, 51)

    victim.unlink()
    assert bench.sidecar.target(flipped).error_code == "object_missing"
    bench.serves(good, 51)
    victim.write_bytes(kept)
    bench.sidecar.serve(flipped)
    bench.serves(flipped, 52)

    name = "model.layers.0.mlp.up_proj.weight"
    whole = bench.line.tensors[name]
    other = bench.line.publish({name: torch.zeros(whole.shape[0] // 2, whole.shape[1], dtype=whole.dtype)})
    assert bench.sidecar.target(other).error_code == "model_invalid"
    bench.serves(flipped, 52)
    back = bench.line.publish({name: whole})
    bench.sidecar.serve(back)
    bench.serves(back, 52)


def test_a_shadow_that_is_not_what_it_was_is_repaired_from_a_snapshot_and_never_served(bench: Bench):
    bench.sidecar.serve(bench.sign(53))
    bench.ask_worker("slipway_spoil_shadow")
    version = bench.sign(54)
    status = bench.sidecar.serve(version)
    assert "did not come out" in bench.sidecar.told()
    assert status.update is not None
    assert status.update.hops == bench.line.steps()  # the snapshot, and each delta after it that is needed
    bench.serves(version, 54)
    asked = bench.sidecar.serve(bench.sign(55), repair=True)
    assert asked.update is not None
    assert asked.update.hops == bench.line.steps()
    bench.serves(bench.line.versions[-1], 55)


def test_a_load_that_breaks_off_is_made_again_whole(bench: Bench):
    first = bench.line.publish(rig.stepped(bench.base, seed=1))
    bench.sidecar.serve(first)
    expected = {first.name: asyncio.run(rig.batch(bench.sidecar))}
    second = bench.line.publish(rig.stepped(bench.base, seed=2))
    bench.ask_worker("slipway_break_loads", "1")
    bench.sidecar.serve(second)
    assert "loading everything again" in bench.sidecar.told()
    expected[second.name] = asyncio.run(rig.batch(bench.sidecar))
    assert expected[first.name] != expected[second.name]
    for version in (first, second):  # by loads that did not break off
        bench.sidecar.serve(version)
        rig.same(asyncio.run(rig.batch(bench.sidecar)), expected[version.name])


def test_a_model_that_holds_half_a_version_says_so_and_answers_nobody_until_a_target_repairs_it(bench: Bench):
    bench.sidecar.serve(bench.sign(62))
    bench.ask_worker("slipway_break_loads", "2")
    broken = bench.sign(63)

    async def during() -> list[object]:
        running = [asyncio.ensure_future(bench.tokens(count=400)) for _ in range(3)]
        await asyncio.sleep(0.2)
        status = await asyncio.to_thread(bench.sidecar.target, broken)
        assert (status.state, status.error_code) == (SlotState.POISONED, "engine_error")
        return await asyncio.gather(*running, return_exceptions=True)

    for ended in asyncio.run(during()):
        if isinstance(ended, Generated):
            assert set(ended.token_ids) <= {62}
        else:
            assert isinstance(ended, EngineError)
    with pytest.raises(EngineUnreachable, match="holds a part of an update"):
        asyncio.run(bench.tokens())
    assert bench.sidecar.status().state is SlotState.POISONED
    repaired = bench.sign(64)
    bench.sidecar.serve(repaired)
    bench.serves(repaired, 64)
