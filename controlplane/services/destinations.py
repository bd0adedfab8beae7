"""Where a message of ours may go: the public internet over https, and networks that a setting names.

A URL that a user typed must not reach what only we can reach: metadata services, databases, other tenants. Names are
resolved once, every address is checked, and the request goes to the address that was checked, not to the name.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from django.conf import settings

from controlplane.errors import Invalid, Unavailable

_TRANSLATED = ipaddress.ip_network("64:ff9b::/32")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Destination:
    """A checked URL: `url` names the address to connect to, `host` what it is called and must prove to be."""

    url: str
    host: str
    netloc: str


def destination_check(url: str) -> tuple[str, int]:
    """Host and port of a URL whose form is allowed; nothing is resolved. Raises: Invalid, saying why it is not."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Invalid("the url does not parse", field="url") from error
    host = parts.hostname or ""
    if parts.username or parts.password or parts.fragment:
        raise Invalid("the url must carry neither credentials nor a fragment", field="url")
    if not host or not url.isascii() or any(character.isspace() for character in url):
        raise Invalid("the url needs a host, in ASCII and without spaces", field="url")
    plain = parts.scheme == "http" and _literal(host) is not None and _named_by_setting(host)
    if parts.scheme != "https" and not plain:
        raise Invalid("the url must begin with https:// (http:// only to an address of ALERT_HOOK_NETWORKS)", "url")
    literal = _literal(host)
    if literal is not None and not _allowed(literal):
        raise Invalid(f"{host} is not a public address, and not of ALERT_HOOK_NETWORKS", field="url")
    return host, port or (443 if parts.scheme == "https" else 80)


def destination_resolve(url: str) -> Destination:
    """The address to connect to. Raises: Invalid when any address of the name is not allowed; Unavailable."""
    host, port = destination_check(url)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unavailable(f"{host} does not resolve: {error}") from error
    addresses = [ipaddress.ip_address(str(row[4][0]).split("%")[0]) for row in found]
    refused = [address for address in addresses if not _allowed(address)]
    if refused or not addresses:
        raise Invalid(f"{host} resolves to {refused[0] if refused else 'nothing'}: not a public address", field="url")
    parts = urlsplit(url)
    shown = f"[{addresses[0]}]" if addresses[0].version == 6 else str(addresses[0])
    return Destination(parts._replace(netloc=f"{shown}:{port}").geturl(), host, parts.netloc)


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _allowed(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _allowed(address.ipv4_mapped)
        if address.sixtofour or address.teredo or address in _TRANSLATED:  # an IPv4 address in disguise
            return _in_networks(address)
    return (address.is_global and not address.is_multicast) or _in_networks(address)


def _named_by_setting(host: str) -> bool:
    literal = _literal(host)
    return literal is not None and _in_networks(literal)


def _in_networks(address: Address) -> bool:
    return any(address in network for network in settings.ALERT_HOOK_NETWORKS)
