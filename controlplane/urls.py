"""Routes of the web process, but for the gateway's: see `controlplane.asgi`."""

from __future__ import annotations

from django.urls import include, path

from controlplane.api.health import healthz
from controlplane.gateway.webhook import webhook

urlpatterns = [
    path("healthz", healthz),
    path("api/v1/", include("controlplane.api.urls")),
    path("hooks/v1/<slug:source>", webhook),
    path("", include("frontend.urls")),
]

handler400 = "controlplane.api.fallbacks.bad_request"
handler403 = "controlplane.api.fallbacks.permission_denied"
handler404 = "controlplane.api.fallbacks.not_found"
handler500 = "controlplane.api.fallbacks.server_error"
