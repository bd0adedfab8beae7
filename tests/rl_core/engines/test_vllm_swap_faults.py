"""Swaps of a vLLM that fail at each step, in each way: a token is given only under the name of what sampled it.

The sidecar is the real one; the vLLM before it is scripted, and its tokens tell which weights, caches and ranks made
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
from engine_factories import wait_until
from scripted_vllm import Bench, root, serving, version

from rl_core.engines import targets
from rl_core.engines.client import EngineClient
from rl_core.engines.protocol import GenerateBody, SlotState, TargetBody, TokenEvent
from rl_core.engines.vllm import replica
from rl_core.errors import EngineError, EngineUnreachable, VersionUnavailable
from rl_core.types import FinishReason, PauseMode, SamplingParams, VersionRef

STEPS = itertools.count(1)
SWAP = ("/start_weight_update", "/pause", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume")
PATHS = (*SWAP, "slipway_status", "slipway_counts")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "_WATCH_S", 0.05)
        patch.setattr(targets, "_RETRY_AFTER_S", (0.02, 0.2, 1.0))
        with serving(tmp_path_factory.mktemp("scripted")) as made:
            wait_until(made.attached)
            yield made


class Reader:
    """Reads streams without an end, and holds each token against its name. `told` is what it has read."""

    def __init__(self, bench: Bench) -> None:
        self.told: list[tuple[str, int]] = []
        self.ended: list[EngineError | FinishReason] = []
        self.client = bench.client()
        self._tasks = [asyncio.ensure_future(self._read())]

    def one_version(self, step: int) -> None:
        """Read one more, of one exact version."""
        self._tasks.append(asyncio.ensure_future(self._read(exact_version=version(step))))

    async def first(self, step: int) -> None:
        """Wait for a token of a version."""
        async with asyncio.timeout(20):
            while (version(step), step) not in self.told[-1:]:
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.client.aclose()

    async def _read(self, **bounds: str) -> None:
        body = GenerateBody(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1 << 15), **bounds)
        named = ""
        try:
            async for event in self.client.stream(body):
                if isinstance(event, TokenEvent):
                    named = event.version or named
                    self.told.append((named, event.token))
                    assert bounds.get("exact_version", named) == named
                else:
                    self.ended.append(event.result.finish_reason)
        except EngineError as error:
            self.ended.append(error)


async def swap_with_faults(bench: Bench, lay: Callable[[], None]) -> list[EngineError | FinishReason]:
    """Swap with the faults that `lay` lays, and then until it is done; what ended the streams meanwhile."""
    old, new = next(STEPS), next(STEPS)
    assert (await asyncio.to_thread(bench.target, old)).version == version(old)
    reader = Reader(bench)
    await reader.first(old)
    reader.one_version(old)
    lay()
    await asyncio.to_thread(bench.target, new)
    if bench.attached() and (status := bench.status()).state is SlotState.READY:
        # Whatever it says that it serves, it does.
        await asks(reader.client, old if status.version == version(old) else new)
    async with asyncio.timeout(30):
        while bench.status().version != version(new) or bench.vllm.laid or not bench.attached():
            await asyncio.to_thread(bench.target, new)
            await asyncio.sleep(0.02)
    await asks(reader.client, new)
    await reader.close()
    assert {(named, token) for named, token in reader.told} <= {(version(old), old), (version(new), new)}
    status = bench.status()
    assert (status.version, status.root, status.state) == (version(new), root(new), SlotState.READY)
    return reader.ended


async def asks(client: EngineClient, step: int) -> None:
    """A new request is answered by a version, under its name; one for another exact version is not."""
    result = await client.generate([1, 2], SamplingParams(max_tokens=2), exact_version=VersionRef("a", 0, step))
    assert (result.token_ids, [span.version for span in result.spans]) == ([step] * 2, [version(step)])
    with pytest.raises(EngineError):
        await client.generate([1, 2], SamplingParams(max_tokens=2), exact_version=VersionRef("a", 0, step + 1))


@pytest.mark.parametrize(("fault", "times"), [("refused", 1), ("failed", 1), ("lost", 1), ("lost", 3)])
@pytest.mark.parametrize("path", PATHS)
async def test_a_step_of_a_swap_that_fails_gives_no_token_another_name(bench: Bench, path: str, fault: str, times: int):
    ended = await swap_with_faults(bench, lambda: bench.vllm.faults.update({path: [fault] * times}))
    # What wants the old version alone is given up; all else goes on.
    assert [type(end) for end in ended] == [VersionUnavailable]


async def test_a_cache_that_is_not_dropped_is_not_generated_over(bench: Bench):
    await swap_with_faults(bench, lambda: bench.vllm.drops.extend([False, False, False]))


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["keeps", "breaks"])
async def test_a_rank_that_does_not_load_what_others_do_generates_with_them_only_when_it_has(
    bench: Bench, what: str, rank: int, times: int
):
    ended = await swap_with_faults(bench, lambda: setattr(bench.vllm.workers[rank], what, times))
    # What breaks off once is loaded again; then nothing can be generated, and what was begun ends.
    assert (FinishReason.ABORT in ended) is (times > 1)


async def test_when_no_rank_loads_the_old_version_goes_on(bench: Bench):
    def lay() -> None:
        for worker in bench.vllm.workers:
            worker.keeps = 1

    faults = bench.control.metrics()["faults_total"]
    assert FinishReason.ABORT not in await swap_with_faults(bench, lay)
    assert bench.control.metrics()["faults_total"] == faults


def test_ranks_share_the_limit_of_what_is_read_from_the_store(bench: Bench):
    step = next(STEPS)
    target = TargetBody(version=version(step), root=root(step), manifest="m/manifest.json", limit_bytes_s=1000.0)
    bench.sidecar.replica.prepare(target, interrupted=lambda: False)
    assert [rank.staged.limit_bytes_s for rank in bench.vllm.workers] == [500.0, 500.0]


def test_a_rank_that_does_not_attach_says_why_until_it_does(bench: Bench):
    rank, why = bench.vllm.workers[1], "cannot use the spool folder"
    rank.tell(attached=False, error=why, error_code="store_unavailable")
    bench.sidecar.replica.lost(EngineUnreachable("the connection broke"))
    status = bench.target(step := next(STEPS))
    assert status.error_code == "engine_unreachable"
    assert why in status.error
    assert not bench.attached()
    rank.tell(attached=True, error=None, error_code=None)
    wait_until(bench.attached)
    assert bench.target(step).version == version(step)


def test_a_pause_outlasts_a_lost_connection_until_somebody_resumes(bench: Bench):
    bench.target(next(STEPS))
    bench.control.pause(PauseMode.KEEP)
    bench.sidecar.replica.lost(EngineUnreachable("the connection broke"))
    wait_until(bench.attached)
    assert bench.vllm.paused
    bench.target(step := next(STEPS))
    assert bench.vllm.paused
    bench.control.resume()
    assert not bench.vllm.paused
    assert bench.status().version == version(step)


def test_a_pause_and_a_resume_that_fail_leave_vllm_generating(bench: Bench):
    bench.control.pause(PauseMode.KEEP)
    bench.vllm.faults = {"/resume": ["refused"]}
    with pytest.raises(EngineError):
        bench.control.resume()
    wait_until(lambda: bench.attached() and not bench.vllm.paused)
    bench.vllm.faults = {"/pause": ["lost"]}
    with pytest.raises(EngineError):
        bench.control.pause(PauseMode.KEEP)
    wait_until(lambda: bench.attached() and not bench.vllm.paused)
