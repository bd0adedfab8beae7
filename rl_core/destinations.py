"""Where a message of ours may go: the public internet over https, and networks that the operator names.

A URL that somebody typed must not reach what only we can reach: metadata services, databases, other tenants. Names are
resolved once, every address is checked, and the request goes to the address that was checked, not to the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpx

from rl_core.errors import AnswerTooLarge, DestinationRefused, DestinationUnreached

CONNECT_S = 5.0
_TRANSLATED = ipaddress.ip_network("64:ff9b::/32")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Destination:
    """A checked URL: `url` names the address to connect to, `host` what it is called and must prove to be."""

    url: str
    host: str
    netloc: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: a status, a body within its bound, and headers by their lower-case names."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reach:
    """What may be reached beside the public internet. `setting` is what the networks are called in messages."""

    networks: Sequence[Network] = ()
    setting: str = "the allowed networks"

    def check(self, url: str) -> tuple[str, int]:
        """Host and port of a URL whose form is allowed; nothing is resolved. Raises: DestinationRefused."""
        parts, port = _split(url)
        host = parts.hostname or ""
        if parts.username or parts.password or parts.fragment:
            raise DestinationRefused("the url must carry neither credentials nor a fragment")
        if not host or not url.isascii() or any(character.isspace() for character in url):
            raise DestinationRefused("the url needs a host, in ASCII and without spaces")
        literal = _literal(host)
        plain = parts.scheme == "http" and literal is not None and self._in_networks(literal)
        if parts.scheme != "https" and not plain:
            raise DestinationRefused(f"the url must begin with https:// (http:// only to an address of {self.setting})")
        if literal is not None and not self._allows(literal):
            raise DestinationRefused(f"{host} is not a public address, and not of {self.setting}")
        return host, port or (443 if parts.scheme == "https" else 80)

    def resolve(self, url: str) -> Destination:
        """The address to connect to. Raises: DestinationRefused when any address of the name is not allowed;
        DestinationUnreached when there is none now.
        """
        host, port = self.check(url)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise DestinationUnreached(f"{host} does not resolve: {error}") from error
        addresses = [ipaddress.ip_address(str(row[4][0]).split("%")[0]) for row in found]
        refused = [address for address in addresses if not self._allows(address)]
        if refused or not addresses:
            raise DestinationRefused(f"{host} resolves to {refused[0] if refused else 'nothing'}: not a public address")
        parts = urlsplit(url)
        shown = f"[{addresses[0]}]" if addresses[0].version == 6 else str(addresses[0])
        return Destination(parts._replace(netloc=f"{shown}:{port}").geturl(), host, parts.netloc)

    def _allows(self, address: Address) -> bool:
        if isinstance(address, ipaddress.IPv6Address):
            if address.ipv4_mapped is not None:
                return self._allows(address.ipv4_mapped)
            if address.sixtofour or address.teredo or address in _TRANSLATED:  # an IPv4 address in disguise
                return self._in_networks(address)
        return (address.is_global and not address.is_multicast) or self._in_networks(address)

    def _in_networks(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def trusted(url: str) -> Destination:
    """A URL that the operator typed, unchecked: it may lead into their own network. Raises: DestinationRefused."""
    parts, _ = _split(url)
    written = parts.username or parts.password or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or written:
        raise DestinationRefused("the url must be http:// or https:// with a host, without credentials or a fragment")
    return Destination(url, parts.hostname, parts.netloc)


async def post(
    destination: Destination, *, body: bytes, headers: Mapping[str, str], timeout_s: float, max_bytes: int = 0
) -> Answer:
    """Post to a checked address; `timeout_s` bounds everything. With `max_bytes` 0 the answer's body is not read.

    No redirect is followed. The connection goes to the address that was checked; the name is what its certificate has
    to prove. Raises: DestinationUnreached when no whole answer comes in time, AnswerTooLarge past its bound.
    """
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=0)
    timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=timeout, limits=limits, follow_redirects=False, trust_env=False) as client,
            client.stream(
                "POST",
                destination.url,
                content=body,
                headers={**headers, "host": destination.netloc, "user-agent": "slipway", "accept-encoding": "identity"},
                extensions={"sni_hostname": destination.host},
            ) as response,
        ):
            body = await _read(response, max_bytes) if max_bytes else b""
            return Answer(response.status_code, body, {name.lower(): text for name, text in response.headers.items()})
    except AnswerTooLarge as error:
        raise AnswerTooLarge(f"{destination.host}: {error}") from None
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        raise DestinationUnreached(f"{destination.host} did not answer: {type(error).__name__}: {error}") from error


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    received = bytearray()
    async for piece in response.aiter_raw():  # a small answer that unpacks to a large one stays small
        received += piece
        if len(received) > max_bytes:
            raise AnswerTooLarge(f"the answer is over {max_bytes} bytes")
    return bytes(received)


def _split(url: str) -> tuple[SplitResult, int | None]:
    """The parts of a URL that can be asked, by the rules of everything that will. Raises: DestinationRefused."""
    try:
        parts = urlsplit(url)
        httpx.URL(url)
        (parts.hostname or "").encode("idna")
        return parts, parts.port
    except (ValueError, httpx.InvalidURL) as error:
        raise DestinationRefused("the url does not parse") from error


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
