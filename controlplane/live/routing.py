"""Websocket routes."""

from __future__ import annotations

from typing import Any

from django.urls import path

from controlplane.live.consumers import LiveConsumer

# Any: an ASGI application is no view, which is what Django's `path` is typed for.
live: Any = LiveConsumer.as_asgi()
websocket_urlpatterns: list[Any] = [path("ws/v1/live", live)]
