"""Websocket routes."""

from __future__ import annotations

from django.urls import path

from controlplane.live.consumers import LiveConsumer

websocket_urlpatterns = [path("ws/v1/live", LiveConsumer.as_asgi())]  # type: ignore[arg-type]
