"""vLLM's HTTP interface, as far as the sidecar uses it: its development mode for control, token in and out for work.

Answers are vLLM's own, on loopback, yet parsed as anybody's: bounded, of the expected shape, else an `EngineError`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final, TypeVar

import httpx
import msgspec

from rl_core.engines.protocol import TargetBody
from rl_core.engines.vllm.messages import TransferSource, WorkerRoutes, WorkerStatus
from rl_core.errors import EngineError, EngineUnreachable, RequestRefused
from rl_core.types import PauseMode

_TIMEOUT: Final = httpx.Timeout(60.0, connect=5.0)
# Reading and hashing the shadow, and loading a whole model, take what the disk and the memory give.
_LONG: Final = httpx.Timeout(1800.0, connect=5.0)
_UNBOUNDED: Final = httpx.Timeout(None, connect=5.0)
_MAX_ERROR_CHARS: Final = 500
_T = TypeVar("_T")


class _Results(msgspec.Struct):
    results: list[str | None]


class _Success(msgspec.Struct):
    success: bool


class Span(msgspec.Struct):
    """Output tokens `[start, end)` of one weight version."""

    version: str
    start: int
    end: int


class TokenLogprob(msgspec.Struct):
    """One candidate of a position. `rank` counts from 1."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None


class SampledLogprob(TokenLogprob):
    """The sampled token, with candidates."""

    top_logprobs: list[TokenLogprob] = []


class Logprobs(msgspec.Struct):
    """One entry for each output token."""

    content: list[SampledLogprob] | None = None


class Choice(msgspec.Struct):
    """One completion, or what one event of a stream adds to it."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None


class CachedTokens(msgspec.Struct):
    """Prompt tokens that came out of the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What a call took."""

    prompt_tokens_details: CachedTokens | None = None


class Completion(msgspec.Struct):
    """An answer of `/inference/v1/generate`, whole or one event of it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class VllmControl:
    """Steers one vLLM. Every method raises EngineUnreachable when it does not answer, EngineError when it refuses."""

    def __init__(self, url: str) -> None:
        # A connection for each call: vLLM closes one after an error of its own, and the next call would meet that.
        self._http = httpx.Client(
            base_url=url, timeout=_TIMEOUT, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
        )

    def healthy(self) -> bool:
        """Whether it answers and its engine lives."""
        try:
            return self._http.get("/health").is_success
        except httpx.HTTPError:
            return False

    def attach(self, source: TransferSource | None, *, twin: bool) -> list[WorkerStatus]:
        """Have the workers read their shadows, meter steps, keep routes and make twins, unless they did."""
        told = msgspec.json.encode(source).decode()
        return self._workers("slipway_attach", WorkerStatus, told, "yes" if twin else "no", timeout=_LONG)

    def workers(self) -> list[WorkerStatus]:
        """How the workers are."""
        return self._workers("slipway_status", WorkerStatus)

    def prepare(self, target: TargetBody) -> list[WorkerStatus]:
        """Start all workers on a target."""
        return self._workers("slipway_prepare", WorkerStatus, msgspec.json.encode(target).decode())

    def counts(self, in_flight: list[str]) -> dict[str, int]:
        """Output tokens of those of the requests in flight that have any; of others none need be known any more."""
        return self._workers("slipway_counts", dict[str, int], msgspec.json.encode(in_flight).decode())[0]

    def pause(self, mode: PauseMode) -> None:
        """Pause; `wait` returns when what was running has finished."""
        self._post("/pause", None, params={"mode": mode.value, "clear_cache": "false"}, timeout=_UNBOUNDED)

    def resume(self) -> None:
        """Go on."""
        self._post("/resume", None)

    def begin_update(self) -> None:
        """Announce an update, which may be done before the pause."""
        self._post("/start_weight_update", None)

    def load(self, version: str) -> None:
        """Have every worker load what it has staged, if it can: each says itself what it holds then.

        vLLM must be paused, and the update begun.
        """
        self._post("/update_weights", {"update_info": {"version": version}}, timeout=_LONG)

    def finish_update(self, version: str | None) -> None:
        """End an update; the weights are then named `version`, unless that is None."""
        self._post("/finish_weight_update", {"weight_version": version})

    def label(self, version: str) -> None:
        """Name the weights that serve."""
        self._post("/update_weight_version", {"new_version": version})

    def drop_caches(self) -> None:
        """Forget all keys and values; running requests compute theirs again. Raises: EngineError when it did not."""
        response = self._post("/reset_prefix_cache", None, params={"reset_running_requests": "true"})
        # 200 with success:false is how it says that blocks are still held.
        if not self._decoded(response, _Success).success:
            raise EngineError("vLLM did not drop its prefix cache; stale keys and values would be used")

    def abort_all(self) -> None:
        """End every request with what it has."""
        self._post("/abort_requests", {})

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _workers(self, method: str, kind: type[_T], *arguments: str, timeout: httpx.Timeout = _TIMEOUT) -> list[_T]:
        body = {"method": method, "args": list(arguments)}
        results = self._decoded(self._post("/collective_rpc", body, timeout=timeout), _Results).results
        if not results:
            raise EngineError(f"no worker of vLLM answered {method}")
        try:
            return [msgspec.json.decode(result or "null", type=kind) for result in results]
        except msgspec.DecodeError as error:
            raise EngineError(f"a worker's answer does not read: {error}; is it of another release?") from error

    def _post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self._call("POST", path, **({} if body is None else {"json": body}), **options)

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise unreachable(error) from error
        if not response.is_success:
            raise EngineError(f"vLLM refused {path}: {refusal_of(response)}")
        return response

    def _decoded(self, response: httpx.Response, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"vLLM's answer to {response.url.path} does not read: {error}") from error


class VllmInference:
    """Generates on one vLLM, for one event loop. Raises: EngineUnreachable, EngineError, RequestRefused."""

    def __init__(self, url: str, *, max_connections: int) -> None:
        self.http = httpx.AsyncClient(
            base_url=url,
            timeout=_UNBOUNDED,
            # Idle connections are given up before vLLM does so, which is after five seconds.
            limits=httpx.Limits(max_connections=max_connections, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def whole(self, body: dict[str, Any]) -> Completion:
        """One generation. Cancelling the task aborts it in vLLM."""
        try:
            response = await self.http.post("/inference/v1/generate", json=body)
        except httpx.HTTPError as error:
            raise unreachable(error) from error
        _raise_for(response)
        return _completion(response.text)

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Completion, None]:
        """Events of a generation. Closing the iterator aborts it in vLLM."""
        try:
            async with self.http.stream("POST", "/inference/v1/generate", json={**body, "stream": True}) as response:
                if not response.is_success:
                    await response.aread()
                    _raise_for(response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data and data != "[DONE]":
                        yield _completion(data)
        except httpx.HTTPError as error:
            raise unreachable(error) from error

    async def take_routes(self, request_id: str) -> WorkerRoutes | None:
        """The routed experts that the first worker kept of a finished request."""
        body = {"method": "slipway_take_routes", "args": [request_id]}
        try:
            response = await self.http.post("/collective_rpc", json=body, timeout=_TIMEOUT)
            results = msgspec.json.decode(response.content, type=_Results).results
            return msgspec.json.decode(results[0] or "null", type=WorkerRoutes | None)
        except httpx.HTTPError as error:
            raise unreachable(error) from error
        except (msgspec.DecodeError, IndexError) as error:
            raise EngineError(f"vLLM's answer with routed experts does not read: {error}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self.http.aclose()


def unreachable(error: httpx.HTTPError) -> EngineUnreachable:
    """What a connection that failed means."""
    return EngineUnreachable(f"no answer from vLLM: {type(error).__name__}: {error}; is it starting or gone?")


def refusal_of(response: httpx.Response) -> str:
    """What an answer that is an error says, in few words."""
    try:
        body = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        body = response.text
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return f"HTTP {response.status_code}: {str(message)[:_MAX_ERROR_CHARS]}"


def _raise_for(response: httpx.Response) -> None:
    if not response.is_success:
        kind = RequestRefused if response.status_code == 400 else EngineError
        raise kind(f"vLLM refused the request: {refusal_of(response)}")


def _completion(data: str) -> Completion:
    try:
        completion = msgspec.json.decode(data, type=Completion)
    except msgspec.DecodeError as error:
        raise EngineError(f"vLLM's event does not read: {error}") from error
    if completion.error is not None:
        raise EngineError(f"vLLM's generation failed: {str(completion.error)[:_MAX_ERROR_CHARS]}")
    return completion
