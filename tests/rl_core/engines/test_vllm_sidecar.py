"""The sidecar's parts that need no vLLM: its command line, requests in flight, and what it makes of vLLM's answers."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from pathlib import Path

import numpy as np
import pytest

from rl_core.engines.vllm.generate import _Collected, _routes_of_npy, _spans, _tops
from rl_core.engines.vllm.launch import VllmOptions, vllm_arguments, vllm_environment
from rl_core.engines.vllm.openai import _versions
from rl_core.engines.vllm.tickets import Tickets
from rl_core.engines.vllm.upstream import Choice, Completion, Logprobs, SampledLogprob, Span, TokenLogprob
from rl_core.errors import EngineBusy, EngineError, EngineUnreachable, VersionUnavailable
from rl_core.types import FinishReason, VersionRef, VersionSpan

OLD, NEW = VersionRef("a", 0, 1), VersionRef("a", 0, 2)


def options(**fields: object) -> VllmOptions:
    return VllmOptions(model=Path("m"), name="n", port=1, max_seqs=2, max_len=3, **fields)


def test_routes_are_the_flags_on_an_accelerator_and_recorded_without_prefix_caching_on_a_cpu():
    wanted = options(routes=True, extra=("--tensor-parallel-size", "4"))
    on_gpu, on_cpu = vllm_arguments(wanted, cpu=False), vllm_arguments(wanted, cpu=True)
    assert "--enable-return-routed-experts" in on_gpu
    assert "--no-enable-prefix-caching" not in on_gpu
    assert "--enable-return-routed-experts" not in on_cpu
    assert "--no-enable-prefix-caching" in on_cpu
    assert on_gpu[-2:] == on_cpu[-2:] == ["--tensor-parallel-size", "4"]
    assert on_gpu[on_gpu.index("--host") + 1] == "127.0.0.1"
    assert "--no-enable-prefix-caching" not in vllm_arguments(options(), cpu=True)


def test_a_cpu_gets_no_batch_invariance_and_its_threads_unless_told_otherwise(tmp_path: Path):
    told = {"VLLM_BATCH_INVARIANT": "1", "OMP_NUM_THREADS": "7"}
    environment = vllm_environment(told, cpu=True, shim=tmp_path)
    assert "VLLM_BATCH_INVARIANT" not in environment
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert vllm_environment(told, cpu=False, shim=tmp_path)["VLLM_BATCH_INVARIANT"] == "1"


def open_tickets(*, capacity: int = 8) -> Tickets:
    tickets = Tickets(capacity=capacity)
    tickets.closed, tickets.version = None, OLD
    return tickets


async def test_requests_are_admitted_by_version_and_room():
    tickets = open_tickets(capacity=1)
    with pytest.raises(VersionUnavailable), tickets.admitted(min_version=NEW):
        pass
    with tickets.admitted(exact_version=OLD), pytest.raises(EngineBusy), tickets.admitted():
        pass
    assert len(tickets) == 0
    tickets.closed = EngineError("starting")
    with pytest.raises(EngineError, match="starting"), tickets.admitted():
        pass


async def test_before_a_swap_nothing_is_taken_that_it_ends_and_what_is_left_fails():
    tickets = open_tickets()
    begun, go_on = threading.Event(), threading.Event()

    def swap() -> None:
        with tickets.succession(NEW, drain_s=0.2):
            begun.set()
            assert go_on.wait(10)
            tickets.swapped(NEW, {})

    with tickets.admitted(exact_version=OLD) as ticket, tickets.admitted() as other:
        work = asyncio.ensure_future(ticket.run(asyncio.sleep(60)))
        swapping = asyncio.ensure_future(asyncio.to_thread(swap))
        await asyncio.sleep(0.05)
        with pytest.raises(VersionUnavailable, match="a:0-1 and then a:0-2"), tickets.admitted(exact_version=OLD):
            pass
        assert not begun.is_set()  # it still has a while to finish
        with pytest.raises(VersionUnavailable):
            await work
        assert await asyncio.to_thread(begun.wait, 10)
        assert await other.run(asyncio.sleep(0, result=5)) == 5
        go_on.set()
        await swapping
    with tickets.admitted(exact_version=NEW):
        pass


async def test_tokens_before_the_swap_keep_their_version():
    tickets = open_tickets()
    with tickets.admitted() as ticket, tickets.admitted() as late:
        tickets.swapped(NEW, {ticket.identity: 3})
        assert [ticket.version_of(place) for place in range(5)] == ["a:0-1"] * 3 + ["a:0-2"] * 2
        assert late.version_of(0) == "a:0-2"


async def test_a_swap_after_the_last_token_names_no_version_of_an_answer():
    tickets = open_tickets()
    with tickets.admitted(labelled=True) as ticket:
        assert tickets.left == 0
        assert tickets.labelled() == [ticket.identity]
        tickets.swapped(NEW, {ticket.identity: 3})
        for tokens, versions in ((3, ["a:0-1"]), (4, ["a:0-1", "a:0-2"]), (0, ["a:0-1"])):
            assert list(_versions(b'{"usage":{"completion_tokens":%d}}' % tokens, ticket)) == versions
        with pytest.raises(EngineError, match="does not read"):
            _versions(b"<html>", ticket)
    assert tickets.left == 1  # somebody is to be told
    assert tickets.labelled() == []
    assert tickets.left == 0


async def test_an_evicted_request_fails_even_before_it_waits():
    tickets = open_tickets()
    with tickets.admitted() as ticket:
        tickets.evict_all(EngineError("gone"))
        with pytest.raises(EngineError, match="gone"):
            await ticket.run(asyncio.sleep(60))


def test_spans_are_checked():
    good = [Span("a:0-1", 0, 2), Span("a:0-2", 2, 5)]
    assert _spans(good, 5) == [VersionSpan(0, 2, "a:0-1"), VersionSpan(2, 5, "a:0-2")]
    for bad, tokens in ((good, 6), (good[1:], 5), ([Span("a:0-1", 0, 0)], 0), ([good[0], good[0]], 2)):
        with pytest.raises(EngineError):
            _spans(bad, tokens)
    with pytest.raises(EngineUnreachable, match="started again"):
        _spans([Span("default", 0, 2)], 2)


def npy(rows: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue()).decode()


def test_routed_experts_of_the_flag_are_read_narrow_and_hostile_ones_refused():
    rows = np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    narrow = _routes_of_npy(npy(rows))
    assert (narrow.tokens, narrow.layers, narrow.top_k, narrow.dtype) == (4, 3, 2, "uint8")
    assert narrow.data == bytes(range(24))
    wide = _routes_of_npy(npy(rows + 300))
    assert wide.dtype == "uint16"
    assert wide.data[:4] == b"\x2c\x01\x2d\x01"
    pickled = npy(np.array([[[{}]]], dtype=object))
    for bad in ("!", "AAAA", npy(rows[0]), npy(rows.astype(np.float32)), npy(rows + (1 << 16)), npy(rows - 1), pickled):
        with pytest.raises(EngineError):
            _routes_of_npy(bad)


def test_candidates_are_the_likeliest_without_a_sampled_token_that_is_none():
    sampled = SampledLogprob(
        7, -5.0, 40, [TokenLogprob(7, -5.0, 40), TokenLogprob(2, -1.0, 2), TokenLogprob(1, -0.5, 1)]
    )
    assert _tops(sampled, 2) == [(1, -0.5), (2, -1.0)]
    assert _tops(sampled, 0) == []


def test_logprobs_of_other_tokens_than_were_sampled_are_refused():
    collected = _Collected()
    choice = Choice(token_ids=[4], logprobs=Logprobs([SampledLogprob(4, -0.5, 1)]), finish_reason="length")
    assert collected.add(Completion([choice])).reason is FinishReason.LENGTH
    with pytest.raises(EngineError, match="other tokens"):
        collected.add(Completion([Choice(token_ids=[4, 5], logprobs=choice.logprobs)]))
    with pytest.raises(EngineError, match="repetition"):
        collected.add(Completion([Choice(token_ids=[], finish_reason="repetition")]))
