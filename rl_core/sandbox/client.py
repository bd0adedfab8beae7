"""The client of sandboxd, asynchronous and synchronous."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec

from rl_core.errors import SpecError, WorldError
from rl_core.sandbox.protocol import RunLimits, RunRequest, RunResult

_QUEUE_S = 120.0  # how long a run may wait for a slot before its caller gives up


class SandboxClient:
    """Runs commands through the sandboxd that listens on a unix socket. Holds nothing: share it freely."""

    def __init__(self, socket_path: Path | str) -> None:
        self._path = Path(socket_path)

    async def run(
        self,
        argv: list[str] | None = None,
        *,
        code: str | None = None,
        files: dict[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: RunLimits | None = None,
    ) -> RunResult:
        """Run a command, or Python `code`, in a fresh sandbox.

        Raises: SpecError for a request that sandboxd refuses, WorldError when it does not answer or is busy.
        """
        if (argv is None) == (code is None):
            raise SpecError("give either argv or code")
        if code is not None:
            argv, files = ["python3", "-I", "-S", "main.py"], {**(files or {}), "main.py": code.encode()}
        request = RunRequest(argv=argv or [], files=files or {}, stdin=stdin, limits=limits or RunLimits())
        response = await self._post(msgspec.msgpack.encode(request), request.limits.wall_s + _QUEUE_S)
        if response.status_code == httpx.codes.OK:
            return msgspec.msgpack.decode(response.content, type=RunResult)
        detail = _detail(response)
        if response.status_code == httpx.codes.BAD_REQUEST:
            raise SpecError(detail)
        raise WorldError(f"sandboxd answered {response.status_code}: {detail}")

    def run_sync(
        self,
        argv: list[str] | None = None,
        *,
        code: str | None = None,
        files: dict[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: RunLimits | None = None,
    ) -> RunResult:
        """The same, for callers without an event loop."""
        return asyncio.run(self.run(argv, code=code, files=files, stdin=stdin, limits=limits))

    async def health(self) -> dict[str, object]:
        """Layers, slots, and how many runs are going on and waiting. Raises: WorldError."""
        async with self._client(10.0) as client:
            try:
                health: dict[str, object] = (await client.get("/v1/health")).json()
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
        return health

    async def _post(self, body: bytes, timeout_s: float) -> httpx.Response:
        async with self._client(timeout_s) as client:
            try:
                return await client.post("/v1/run", content=body)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error

    def _client(self, timeout_s: float) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=str(self._path), verify=False)
        return httpx.AsyncClient(transport=transport, base_url="http://sandboxd", timeout=timeout_s, trust_env=False)

    def _unreachable(self, error: httpx.HTTPError) -> WorldError:
        return WorldError(
            f"sandboxd does not answer on {self._path} ({type(error).__name__}); start it with "
            f"`python -m rl_core.sandbox --socket {self._path} --state DIR`"
        )


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
