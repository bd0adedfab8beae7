"""`manage.py openapi`: write the API's document to `docs/openapi.yaml`, which a test compares with the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from controlplane.api.document import openapi_yaml


class Command(BaseCommand):
    """Writes the document."""

    help = "Write docs/openapi.yaml."

    def handle(self, *args: Any, **options: Any) -> None:
        """Write it where the repository keeps it."""
        path = Path(settings.BASE_DIR) / "docs" / "openapi.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(openapi_yaml())
        self.stdout.write(f"wrote {path}")
