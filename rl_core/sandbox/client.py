"""The client of sandboxd, asynchronous and synchronous."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpcore
import msgspec

from rl_core.errors import SpecError, WorldError
from rl_core.sandbox.protocol import Layer, RunLimits, RunRequest, RunResult, Service, SnapshotMissing
from rl_core.sandbox.trees import encode_tree

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never spoken over a unix socket; to make one takes time
_UNREACHABLE = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)
_QUEUE_S = 120.0  # how long a run may wait for a slot before its caller gives up
_FREEZE_S = 60.0


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
        base: str = "",
        layer: Layer | None = None,
        services: Sequence[Service] = (),
        client: str = "",
    ) -> RunResult:
        """Run a command, or Python `code`, in a fresh sandbox.

        Raises: SpecError for a request that sandboxd refuses, SnapshotMissing for a `base` that it does not have,
        WorldError when it does not answer or is busy.
        """
        if (argv is None) == (code is None):
            raise SpecError("give either argv or code")
        if code is not None:
            argv, files = ["python3", "-I", "-S", "/work/main.py"], {**(files or {}), "main.py": code.encode()}
        request = RunRequest(
            argv=argv or [],
            files=files or {},
            stdin=stdin,
            limits=limits or RunLimits(),
            base=base,
            layer=layer,
            services=list(services),
            client=client,
        )
        body = msgspec.msgpack.encode(request)
        answer = await self._ask("POST", "/v1/run", request.limits.wall_s + _QUEUE_S, content=body)
        return msgspec.msgpack.decode(answer, type=RunResult)

    async def freeze(self, tree: Mapping[str, bytes]) -> str:
        """Register a tree as a read-only snapshot; its identifier is for `base`. What is there already is not sent.

        Raises: SpecError for a tree with odd names or past its bounds, WorldError.
        """
        name, blob = encode_tree(tree)
        if json.loads(await self._ask("GET", f"/v1/snapshots/{name}", _FREEZE_S))["kept"] is not True:
            await self._ask("POST", "/v1/snapshots", _FREEZE_S, content=blob)
        return name

    def run_sync(
        self,
        argv: list[str] | None = None,
        **options: Any,
    ) -> RunResult:
        """The same as `run`, for callers without an event loop."""
        return asyncio.run(self.run(argv, **options))

    async def health(self) -> dict[str, object]:
        """Layers, slots, and how many runs are going on and waiting. Raises: WorldError."""
        health: dict[str, object] = json.loads(await self._ask("GET", "/v1/health", 10.0))
        return health

    async def _ask(self, method: str, path: str, timeout_s: float, content: bytes = b"") -> bytes:
        """The body of the answer. By httpcore without httpx around it, which every start would feel."""
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        async with httpcore.AsyncConnectionPool(uds=str(self._path), ssl_context=_NO_TLS) as pool:
            try:
                response = await pool.request(
                    method, f"http://sandboxd{path}", content=content, extensions={"timeout": timeouts}
                )
            except _UNREACHABLE as error:
                raise self._unreachable(error) from error
        if response.status == HTTPStatus.OK:
            return response.content
        code, detail = _problem(response.content)
        if response.status == HTTPStatus.BAD_REQUEST:
            raise SpecError(detail)
        if code == SnapshotMissing.code:
            raise SnapshotMissing(detail)
        raise WorldError(f"sandboxd answered {response.status}: {detail}")

    def _unreachable(self, error: Exception) -> WorldError:
        return WorldError(
            f"sandboxd does not answer on {self._path} ({type(error).__name__}); start it with "
            f"`python -m rl_core.sandbox --socket {self._path} --state DIR`"
        )


def _problem(body: bytes) -> tuple[str, str]:
    """Code and detail."""
    try:
        problem = json.loads(body)
        return str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return "", body[:200].decode(errors="replace")
