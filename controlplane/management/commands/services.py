"""`manage.py services start|stop|status|keep`: embedded PostgreSQL and Valkey."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ControlPlaneError
from controlplane.processes.services import services_keep, services_start, services_status, services_stop

NOT_RUNNING = 3


class Command(BaseCommand):
    """Exit codes: 0 done (status: all run), 1 failed, 3 status: something does not run."""

    help = "Start, stop, show or keep running the embedded PostgreSQL and Valkey of the state folder."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """One word says what to do."""
        parser.add_argument("action", choices=["start", "stop", "status", "keep"])

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        """Do it, in words a person reads and exit codes a script reads."""
        try:
            if action == "start":
                services_start(settings.STATE_DIR, say=self.stdout.write)
            if action == "stop":
                stopped = services_stop(settings.STATE_DIR)
                self.stdout.write(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")
                return
            if action == "keep":
                services_keep(settings.STATE_DIR, say=self._say)
        except ControlPlaneError as error:
            raise CommandError(str(error)) from error
        self._status()

    def _status(self) -> None:
        status = services_status(settings.STATE_DIR)
        for service in status:
            state = f"running  pid {service.pid}  port {service.port}" if service.pid else "stopped"
            self.stdout.write(f"{service.name:<9} {state}")
        if any(service.pid is None for service in status):
            raise SystemExit(NOT_RUNNING)

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()
