"""`manage.py seed`: the demonstration's project without its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ControlPlaneError
from controlplane.processes.seed import seed_demo
from controlplane.processes.seed_lane import lane_access


class Command(BaseCommand):
    """Exit codes: 0 done, 1 failed."""

    help = "Create the project demo: people, model, task sets, rubrics, clusters and a lane. Safe to run again."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Flags."""
        parser.add_argument("--moe", action="store_true", help="a mixture of experts upcycled from the model")
        parser.add_argument("--model", type=Path, help="another Hugging Face folder (Llama or Mixtral form)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Seed and print the logins."""
        try:
            seeded = seed_demo(say=self.stdout.write, model_folder=options["model"], moe=options["moe"])
        except ControlPlaneError as error:
            raise CommandError(str(error)) from error
        if not options["moe"]:
            lane_access(seeded.project)
            self.stdout.write(f"the lane's gateway key and signing secret are in {settings.STATE_DIR}/demo_lane.json")
        for name, password in seeded.logins.items():
            self.stdout.write(f"log in  {name} / {password}")
