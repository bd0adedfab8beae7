"""`manage.py conductor`: decides what is next, dispatches work, takes lapsed work back, watches replicas."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand

from controlplane.conductor.loop import Conductor


class Command(BaseCommand):
    """Runs the conductor until SIGTERM or SIGINT."""

    help = "Run the conductor: ticks, dispatcher, sweeper and the look at the fleet."

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until told to stop."""
        conductor = Conductor()

        def stop(number: int, frame: FrameType | None) -> None:
            conductor.stop()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        conductor.run()
