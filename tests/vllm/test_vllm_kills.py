"""Sidecar and vLLM killed at any time, in the middle of a swap too: what answers afterwards is one version, whole."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import vllm_rig as rig
from vllm_bench import Bench

from rl_core.engines.protocol import SlotState
from rl_core.errors import EngineUnreachable
from rl_core.types import Generated


def test_a_sidecar_killed_at_any_time_is_followed_by_one_that_knows_where_vllm_stands(bench: Bench):
    versions = {str(version.ref): (version, token) for token in range(70, 76) for version in [bench.sign(token)]}
    bench.sidecar.serve(next(iter(versions.values()))[0])
    moments = random.Random(5)
    for version, _ in list(versions.values())[1:]:
        with bench.sidecar.control() as control:
            control.set_target(version=version.name, root=version.root, manifest=version.manifest)
        time.sleep(moments.uniform(0.0, 0.12))
        bench.sidecar.kill()
        bench.attach()
        stands = bench.sidecar.status().version
        assert stands is not None
        bench.serves(*versions[stands])
    last, token = list(versions.values())[-1]
    bench.sidecar.serve(last)
    bench.serves(last, token)


def test_a_swap_whose_sidecar_is_killed_in_its_middle_is_made_whole_and_found_by_the_next(bench: Bench):
    bench.sidecar.serve(bench.sign(76))
    version = bench.sign(77)
    gate = bench.hold_load(version)
    bench.sidecar.kill()
    gate.unlink()
    bench.attach()
    bench.serves(version, 77)


def test_a_swap_that_breaks_off_after_its_sidecar_was_killed_answers_nobody_until_a_target_repairs_it(bench: Bench):
    bench.sidecar.serve(bench.sign(78))
    gate = bench.hold_load(bench.sign(79), then="break")
    bench.sidecar.kill()
    gate.unlink()
    bench.attach()
    assert bench.sidecar.status().state is SlotState.POISONED
    with pytest.raises(EngineUnreachable, match="holds a part of an update"):
        asyncio.run(bench.tokens())
    last = bench.line.versions[-1]
    bench.sidecar.serve(last)
    bench.serves(last, 79)


def test_a_vllm_killed_in_a_swap_comes_back_with_the_weights_of_its_folder_and_is_targeted_again(bench: Bench):
    bench.sidecar.serve(bench.sign(80))
    version = bench.sign(81)
    gate = bench.hold_load(version)
    bench.kill_vllm()
    gate.unlink()
    rig.wait_until(lambda: bench.sidecar.metrics()["attached"] == 0)
    with pytest.raises(EngineUnreachable):
        asyncio.run(bench.tokens())
    assert bench.sidecar.target(version).error_code in ("engine_unreachable", None)
    bench.start_vllm()
    answers: list[Generated] = []

    def came_back() -> bool:
        try:
            answers.append(asyncio.run(bench.tokens()))
        except EngineUnreachable:
            return False
        return True

    rig.wait_until(came_back, timeout_s=rig.START_S, every_s=0.1)
    # Whatever answered first: it is under the name of what sampled it, the folder's weights, which have none.
    assert [span.version for span in answers[0].spans] == [""]
    status = bench.sidecar.status()
    assert (status.version, status.root) == (None, bench.line.versions[0].root)
    bench.sidecar.serve(version)
    bench.serves(version, 81)
