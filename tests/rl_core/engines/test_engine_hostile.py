"""No body makes the server fail: everything malformed is a 4xx in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import engine_factories as make
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.engines.scheduler import SchedulerLimits
from rl_core.engines.server import EngineServer, ServerOptions

ALLOWED = {200, 400, 404, 409, 413, 429}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = make.make_model_folder(tmp_path_factory.mktemp("m") / "m")
    limits = SchedulerLimits(max_seqs=4, max_len=64, retained=2, max_waiting=64)
    store = str(tmp_path_factory.mktemp("store"))
    one = EngineServer(
        ServerOptions(model=folder, name="tiny", inference_token="i", control_token="c", limits=limits, store=store)
    )
    yield one
    one.close()


async def post(server: EngineServer, path: str, content: bytes) -> httpx.Response:
    server.engine.resume()  # an earlier body may have been a pause
    control = path.startswith("/control")
    transport = httpx.ASGITransport(app=server.control_app if control else server.inference_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=30) as client:
        return await client.post(path, content=content, headers={"Authorization": f"Bearer {'ic'[control]}"})


def check(response: httpx.Response) -> None:
    assert response.status_code in ALLOWED | {202}, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"]
        assert error["type"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
small = st.integers(-3, 300)
tokens = st.lists(st.integers(-5, 262), max_size=70)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt_token_ids": tokens,
    "prompt": tokens | st.text(max_size=40) | st.lists(tokens, max_size=3) | st.lists(st.text(max_size=9), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool", "system", "?"]), "content": st.text(max_size=20)}
        ),
        max_size=3,
    ),
    "max_tokens": small,
    "n": st.integers(-1, 70),
    "temperature": st.floats(-1, 12) | st.none(),
    "top_p": st.floats(-0.1, 1.1) | st.just(5e-324),
    "top_k": small,
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=20),
    "seed": st.integers(-(2**70), 2**70),
    "logprobs": st.booleans() | st.integers(-1, 25),
    "top_logprobs": st.integers(-1, 25),
    "stream": st.booleans(),
    "min_version": st.text(max_size=5) | st.just("l:0-1"),
    "slot": st.text(max_size=5),
    "model": st.sampled_from(["tiny", "tiny:", "tiny:default", "", "other"]),
    "sampling": st.fixed_dictionaries(
        {},
        optional={"temperature": st.floats(0, 11), "top_k": small, "top_p": st.floats(0, 1), "max_tokens": small},
    ),
    "return_routes": st.booleans(),
    "mode": st.text(max_size=4),
    "version": st.text(max_size=4) | st.just("l:0-1"),
    "root": st.text(max_size=4),
    "manifest": st.text(max_size=9) | st.just("../../x"),
}
NEEDED = {
    "/v1/generate": ("prompt_token_ids",),
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/control/pause": ("mode",),
    "/control/target": ("version", "root", "manifest"),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a body that is near what it takes: the right fields, some of them with wrong values."""
    path = draw(st.sampled_from(sorted(NEEDED)))
    names = set(NEEDED[path]) | set(draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=5)))
    body = {name: draw(json_values if draw(st.integers(0, 9)) == 0 else FIELDS[name]) for name in sorted(names)}
    return path, json.dumps(body).encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=bodies())
async def test_bodies_of_the_right_kind(server: EngineServer, request: tuple[str, bytes]) -> None:
    check(await post(server, *request))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(sorted(NEEDED)),
    content=st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()),
)
async def test_bodies_of_no_kind(server: EngineServer, path: str, content: bytes) -> None:
    response = await post(server, path, content)
    check(response)
    assert response.status_code >= 400 or path == "/control/pause"


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "' + b"a" * (9 << 20) + b'"}',
        b'{"prompt_token_ids": [99999999999999999999999999]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b"\xff\xfe",
        b"",
    ],
    ids=["surrogate", "depth", "length", "integer", "infinity", "encoding", "empty"],
)
@pytest.mark.parametrize("path", sorted(NEEDED))
async def test_known_tricks(server: EngineServer, path: str, content: bytes) -> None:
    response = await post(server, path, content)
    check(response)
    assert response.status_code in (400, 413)


async def test_the_server_still_works_after_all_that(server: EngineServer) -> None:
    response = await post(server, "/v1/generate", b'{"prompt_token_ids": [1, 2], "sampling": {"max_tokens": 2}}')
    assert response.status_code == 200
