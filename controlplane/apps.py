"""The control plane as a Django app."""

from __future__ import annotations

from django.apps import AppConfig


class ControlPlaneConfig(AppConfig):
    """All tables live under this app; their migrations in the top-level `migrations` package."""

    name = "controlplane"
    label = "controlplane"
    default_auto_field = "django.db.models.BigAutoField"
