"""The ASGI application: `/v1/`, `/rollouts/v1/` by the gateway, other HTTP by Django, `/ws/v1/live` by the consumer."""

from __future__ import annotations

import os
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")  # noqa: TID251
http: Any = get_asgi_application()  # first: what is imported below needs Django's settings

from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from channels.sessions import SessionMiddlewareStack  # noqa: E402

from controlplane.api.body_limit import body_limited  # noqa: E402
from controlplane.gateway.app import application as gateway  # noqa: E402
from controlplane.live.origin import origin_checked  # noqa: E402
from controlplane.live.routing import websocket_urlpatterns  # noqa: E402

pages = body_limited(http)
GATEWAY = ("/v1/", "/rollouts/v1/")


async def http_by_path(scope: Any, receive: Any, send: Any) -> None:
    """The gateway's paths are those where OpenAI clients look."""
    await (gateway if scope["path"].startswith(GATEWAY) else pages)(scope, receive, send)


application = ProtocolTypeRouter(
    {
        "http": http_by_path,
        "websocket": origin_checked(SessionMiddlewareStack(URLRouter(websocket_urlpatterns))),
    }
)
