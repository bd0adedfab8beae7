"""The pages as a Django app."""

from __future__ import annotations

from django.apps import AppConfig


class FrontendConfig(AppConfig):
    """Templates, static files and page views; it has no tables."""

    name = "frontend"
