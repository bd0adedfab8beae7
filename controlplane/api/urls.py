"""Routes of `/api/v1`. Everything of a project lies below `/projects/{project}`."""

from __future__ import annotations

from django.urls import re_path

from controlplane.api.fallbacks import not_found

urlpatterns = [
    re_path(r"^.*$", not_found),  # last: an unknown path is a problem+json too
]
