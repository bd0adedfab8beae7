"""The connections to an engine: to checked addresses alone where the engine chose its URL itself.

Whatever a URL or a listener does wrong becomes an `httpx.TransportError`, so that callers need to know but that.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from functools import cache
from typing import Final

import httpx

from rl_core.destinations import Destination, Reach
from rl_core.errors import DestinationRefused, DestinationUnreached, EngineUnreachable

_RESOLVED_FOR_S: Final = 10.0


class EngineTransport(httpx.AsyncBaseTransport):
    """Connects to one engine. With `reach` its name is resolved and checked, and the checked address is asked.

    The name stays in the `Host` header and is what a certificate has to prove.
    """

    def __init__(self, *, reach: Reach | None, limits: httpx.Limits) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=_trust(), limits=limits, trust_env=False)
        self._reach = reach
        self._destination: Destination | None = None
        self._until_s = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Raises: httpx.TransportError."""
        try:
            if self._reach is not None:
                await self._direct(request, self._reach)
            return await self._inner.handle_async_request(request)
        except (DestinationRefused, DestinationUnreached, ValueError, OSError) as error:  # a name that is none
            raise httpx.ConnectError(str(error), request=request) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def _direct(self, request: httpx.Request, reach: Reach) -> None:
        """Point the request to the address of its host."""
        if self._destination is None or time.monotonic() >= self._until_s:
            origin = f"{request.url.scheme}://{request.url.netloc.decode()}"
            self._destination = await asyncio.to_thread(reach.resolve, origin)
            self._until_s = time.monotonic() + _RESOLVED_FOR_S
        address = httpx.URL(self._destination.url)
        request.extensions = {**request.extensions, "sni_hostname": self._destination.host}
        request.url = request.url.copy_with(host=address.host, port=address.port)


def url_of(text: str) -> httpx.URL:
    """An engine's URL. Raises: EngineUnreachable for what is none."""
    try:
        return httpx.URL(text)
    except httpx.InvalidURL as error:
        raise EngineUnreachable(f"no engine can be at {text!r}: {error}") from error


@cache
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)
