"""A server process as its clients see it: OpenAI's library, our own clients, and the process itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import engine_factories as make
import engine_process as server
import httpx
import openai
import pytest
import torch

from rl_core.chat import ChatTokenizer
from rl_core.delta import Base, publish_delta, publish_snapshot, weights_root
from rl_core.engines.client import EngineClient
from rl_core.engines.protocol import SlotState
from rl_core.errors import EngineBusy, EngineUnreachable, RequestRefused, VersionUnavailable
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from rl_core.types import FinishReason, KvMode, PauseMode, SamplingParams, VersionRef

LONG = SamplingParams(max_tokens=450)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.endless_model_folder(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.EngineProcess]:
    with server.running_engine(folder, tmp_path_factory.mktemp("state"), **{"max-waiting": 4}) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture
def client(engine: server.EngineProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key=server.INFERENCE_TOKEN, max_retries=0) as one:
        yield one


MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


def test_openai_chat(client: openai.OpenAI, folder: Path) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, n=2, seed=3, logprobs=True, top_logprobs=3,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    prompt = ChatTokenizer.load(folder).render(MESSAGES)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        tokens = choice.model_extra["token_ids"]
        wanted = make.reference_logprobs(make.hf_model(folder), prompt, tokens)
        recorded = torch.tensor([one.logprob for one in choice.logprobs.content])
        assert (recorded - wanted).abs().max() < 1e-4
        tops = [[top.logprob for top in one.top_logprobs] for one in choice.logprobs.content]
        assert all(len(row) == 3 and row == sorted(row, reverse=True) for row in tops)


def test_openai_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "seed": 5}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    pieces, reasons, usage = [], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 10
    assert reasons == ["length"]
    assert usage == whole.usage or (usage and whole.usage and usage.completion_tokens == whole.usage.completion_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_stops_are_cut_off(client: openai.OpenAI, stream: bool) -> None:
    options = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 200, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = next(text[i : i + 2] for i in range(5, len(text)) if text[i : i + 2].isascii() and i > 5)
    answer = client.completions.create(**options, stop=[stop], stream=stream)
    chunks = list(answer) if stream else [answer]
    got = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert got == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_openai_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[[1, 2, 3], [4, 5]], max_tokens=4, logprobs=2, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 4
    assert client.completions.create(model="tiny", prompt="hi").usage.completion_tokens == 16


def test_openai_models_and_errors(client: openai.OpenAI, engine: server.EngineProcess) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="tools are not supported"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[{"type": "function"}])
    with pytest.raises(openai.BadRequestError, match="this engine holds 512"):
        client.completions.create(model="tiny", prompt=[1] * 600)
    with pytest.raises(openai.ConflictError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"exact_version": "x:0-1"})
    assert caught.value.code == "version_unavailable"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{engine.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_tokens_of_one_listener_do_not_open_the_other(engine: server.EngineProcess) -> None:
    for url, token in (
        (f"{engine.control_url}/control/health", server.INFERENCE_TOKEN),
        (f"{engine.control_url}/metrics", server.INFERENCE_TOKEN),
        (f"{engine.url}/v1/models", server.CONTROL_TOKEN),
    ):
        assert httpx.get(url, headers={"Authorization": f"Bearer {token}"}).status_code == 401
        assert httpx.get(url).status_code == 401
    assert httpx.get(f"{engine.url}/control/health", headers=bearer(server.INFERENCE_TOKEN)).status_code == 404


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_generate_gives_what_the_engine_gives(engine: server.EngineProcess, folder: Path) -> None:
    prompt = make.random_prompt(20, seed=1)
    async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
        result = await client.generate(prompt, SamplingParams(max_tokens=10, seed=1))
        again = await client.generate(prompt, SamplingParams(max_tokens=10, seed=1), session="s")
    assert again.token_ids == result.token_ids
    assert again.cached_tokens == 19
    wanted = make.reference_logprobs(make.hf_model(folder), prompt, result.token_ids)
    assert (torch.tensor(result.logprobs) - wanted).abs().max() < 1e-4
    as_json = httpx.post(
        f"{engine.url}/v1/generate", headers=bearer(server.INFERENCE_TOKEN),
        json={"prompt_token_ids": prompt, "sampling": {"max_tokens": 10, "seed": 1}},
    )  # fmt: skip
    assert json.loads(as_json.text)["token_ids"] == result.token_ids


async def test_client_errors(engine: server.EngineProcess) -> None:
    async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
        with pytest.raises(RequestRefused):
            await client.generate([], SamplingParams())
        with pytest.raises(RequestRefused, match="no weight slot"):
            await client.generate([1], SamplingParams(), slot="nowhere")
        with pytest.raises(VersionUnavailable):
            await client.generate([1], SamplingParams(), min_version=VersionRef("l", 0, 1))
    async with EngineClient(f"http://127.0.0.1:{server.free_ports(1)[0]}", "x") as client:
        with pytest.raises(EngineUnreachable):
            await client.generate([1], SamplingParams())


async def test_a_full_queue_is_429_with_retry_after(engine: server.EngineProcess) -> None:
    with engine.control() as control:
        control.pause(PauseMode.KEEP)
        async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
            queued = [asyncio.create_task(client.generate([1], SamplingParams(max_tokens=1))) for _ in range(4)]
            while control.metrics()["waiting"] < 4:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineBusy):
                await client.generate([1], SamplingParams())
            refused = httpx.post(
                f"{engine.url}/v1/generate", headers=bearer(server.INFERENCE_TOKEN), json={"prompt_token_ids": [1]}
            )
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            control.resume()
            assert [len((await task).token_ids) for task in queued] == [1] * 4


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/completions", "stream"])
def test_leaving_aborts(engine: server.EngineProcess, path: str) -> None:
    with engine.control() as control:
        before = control.metrics()["aborted_total"]
        body = {"prompt_token_ids": [5, 6], "sampling": {"max_tokens": 500}}
        if path != "/v1/generate":
            body = {"prompt": [5, 6], "max_tokens": 500, "stream": path == "stream"}
        control.pause(PauseMode.KEEP)  # so that the request cannot end before its client leaves
        host, port = engine.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            content = json.dumps(body).encode()
            target = "/v1/completions" if path == "stream" else path
            raw.sendall(
                f"POST {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.INFERENCE_TOKEN}\r\n"
                f"Content-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
            make.wait_until(lambda: control.metrics()["waiting"] + control.metrics()["running"] == 1)
        make.wait_until(lambda: control.metrics()["waiting"] + control.metrics()["running"] == 0)
        control.resume()
        assert control.metrics()["aborted_total"] == before + 1


def test_metrics_count(engine: server.EngineProcess, client: openai.OpenAI) -> None:
    with engine.control() as control:
        before = control.metrics()
        client.completions.create(model="tiny", prompt=[9, 8, 7, 6], max_tokens=5)
        after = control.metrics()
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == 5
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 4
    assert after["busy_s_total"] > before["busy_s_total"]
    text = httpx.get(f"{engine.control_url}/metrics", headers=bearer(server.CONTROL_TOKEN)).text
    assert f'slipway_engine_generated_tokens_total{{slot="default"}} {int(after["generated_tokens_total"])}' in text


def test_targets_are_reconciled_while_requests_run(folder: Path, tmp_path: Path) -> None:
    """Snapshot, relabel, delta in flight, a damaged target, a step back; every version generates as a fresh model."""
    tensors = read_checkpoint(folder)
    store = open_store((tmp_path / "state" / "store").as_uri())
    versions = [VersionRef("line", 0, number) for number in range(3)]
    changed = make.perturbed(tensors, seed=1, share=0.5)
    second = {**tensors, **changed}
    first = publish_snapshot(store, tensors, key_prefix="snapshots/line/0-0/0", version=versions[0])
    base = Base(version=str(versions[0]), root=first.root, manifest=first.manifest_key)
    delta = publish_delta(store, old=tensors, new=second, version=versions[1], base=base, fence=0)
    with server.running_engine(folder, tmp_path / "state") as engine, engine.control() as control:
        assert control.status().slots["default"].root == weights_root(tensors) == first.root
        control.set_target(version=str(versions[0]), root=first.root, manifest=first.manifest_key)
        status = control.wait_version(str(versions[0]), timeout_s=60)
        assert (status.version, status.state, status.update) == (str(versions[0]), SlotState.READY, None)

        result = asyncio.run(generate_across(engine, control, versions[1], delta.root, delta.manifest_key))
        assert [span.version for span in result.spans] == [str(versions[0]), str(versions[1])]
        status = control.status().slots["default"]
        assert status.update is not None
        assert (status.root, status.update.hops, status.update.changed_tensors) == (delta.root, 1, len(changed))

        control.set_target(version=str(versions[2]), root="0" * 64, manifest="lineages/line/0-2/0/manifest.json")
        status = control.wait_version(str(versions[2]), timeout_s=60)
        assert (status.version, status.state) == (str(versions[1]), SlotState.READY)
        assert status.error
        assert status.error_code == "object_missing"

        control.set_target(version=str(versions[0]), root=first.root, manifest=first.manifest_key)
        assert control.wait_version(str(versions[0]), timeout_s=60).root == first.root
        after = asyncio.run(greedy(engine))
        wanted = make.reference_logprobs(make.hf_model(folder), [1, 2, 3], after.token_ids)
        assert (torch.tensor(after.logprobs) - wanted).abs().max() < 1e-4
        assert engine.stop() == 0


async def generate_across(engine, control, version, root, manifest):
    async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
        running = asyncio.create_task(client.generate([1, 2, 3], LONG))
        while control.metrics()["generated_tokens_total"] < 5:
            await asyncio.sleep(0.005)
        control.pause(PauseMode.KEEP)  # the update is prepared and committed in the middle of the request
        control.set_target(version=str(version), root=root, manifest=manifest, kv=KvMode.RECOMPUTE)
        waited = await asyncio.to_thread(control.wait_version, str(version), timeout_s=60)
        assert waited.version == str(version)
        control.resume()
        return await running


async def greedy(engine: server.EngineProcess):
    async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
        return await client.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))


def test_sigterm_answers_what_is_in_flight(folder: Path, tmp_path: Path) -> None:
    with server.running_engine(folder, tmp_path / "state") as engine, engine.control() as control:

        async def stop_in_the_middle() -> FinishReason:
            async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
                running = asyncio.create_task(client.generate([1, 2, 3], LONG))
                while control.metrics()["generated_tokens_total"] < 5:
                    await asyncio.sleep(0.005)
                engine.process.terminate()
                return (await running).finish_reason

        assert asyncio.run(stop_in_the_middle()) is FinishReason.ABORT
        assert engine.process.wait(60) == 0


@pytest.mark.parametrize("fault", ["port", "folder", "weights", "token"])
def test_a_start_that_cannot_be_says_why(folder: Path, tmp_path: Path, fault: str) -> None:
    flags: dict[str, object] = {}
    wanted = {"port": "cannot listen", "folder": "not a model folder", "weights": "safetensors", "token": "token file"}
    with contextlib.ExitStack() as stack:
        port, control_port = server.free_ports(2)
        if fault == "port":
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        elif fault == "folder":
            flags["model"] = tmp_path
        elif fault == "weights":
            broken = make.make_model_folder(tmp_path / "broken")
            (broken / "model.safetensors").write_bytes(b"\xff" * 64)
            flags["model"] = broken
        elif fault == "token":
            flags["control-token-file"] = tmp_path / "nothing"
        arguments = server.command(folder, tmp_path / "s", port=port, control_port=control_port, **flags)
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1
    assert wanted[fault] in lines[0]
