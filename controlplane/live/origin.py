"""Which origins may open the websocket."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlparse

from channels.security.websocket import AllowedHostsOriginValidator, WebsocketDenier
from django.conf import settings


def origin_checked(application: Any) -> Any:
    """Pages of our own origin pass; so do clients that send no `Origin` and a bearer key, which no browser can.

    A browser always sends `Origin` and cannot set `Authorization` on a websocket: no page elsewhere gets through.
    Another port of the same host is another origin; `CSRF_TRUSTED_ORIGINS` names exceptions.
    """
    allowed_hosts = AllowedHostsOriginValidator(application)

    def trusted(headers: dict[bytes, bytes]) -> bool:
        raw = headers.get(b"origin")
        if raw is None:
            return b"authorization" in headers
        text = raw.decode("latin1")
        if text in settings.CSRF_TRUSTED_ORIGINS:
            return True
        try:
            origin = urlparse(text)
            known = allowed_hosts.valid_origin(origin)
        except ValueError:
            return False
        return bool(known) and origin.netloc == headers.get(b"host", b"").decode("latin1")

    async def check(scope: dict[str, Any], receive: Any, send: Any) -> None:
        inner: Any = application if trusted(dict(scope["headers"])) else WebsocketDenier()
        await inner(scope, receive, send)

    return check
