"""`manage.py export VERSION --folder FOLDER`: a version as a Hugging Face folder, for engines and people elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ControlPlaneError, NotFound
from controlplane.processes.library import version_write
from controlplane.services.replica_reports import version_of
from rl_core.types import WeightFormat


class Command(BaseCommand):
    """Exit codes: 0 written, 1 refused."""

    help = "Write a version as a Hugging Face folder, in the trained weights or in a serving format."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """The version as pages and the API name it, lineage:epoch-number."""
        parser.add_argument("version", help="lineage:epoch-number")
        parser.add_argument("--folder", type=Path, required=True, help="a folder that is not there yet")
        parser.add_argument("--format", choices=[name.value for name in WeightFormat], default=WeightFormat.BF16.value)

    def handle(self, *args: Any, version: str, folder: Path, **options: Any) -> None:
        """Write it, whole or not at all."""
        try:
            found = version_of(version)
            if found is None:
                raise NotFound(f"there is no version {version!r}; pages and the API name them lineage:epoch-number")
            version_write(version=found, folder=folder.absolute(), weight_format=WeightFormat(options["format"]))
        except ControlPlaneError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{found.ref} stands in {folder}")
