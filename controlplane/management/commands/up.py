"""`manage.py up`: run everything on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ControlPlaneError
from controlplane.management.demonstration import positive
from controlplane.processes.bootstrap import STARTED_FLAG, migrate, services_ready
from controlplane.processes.errors import AlreadyRunning
from controlplane.processes.local_engines import MAX_TOKENS, LocalEngines
from controlplane.processes.records import exclusive, write_atomically
from controlplane.processes.services import services_stop
from controlplane.processes.stack import Stack, choose_web_port

SECOND = 3


class Command(BaseCommand):
    """Exit codes: 0 stopped as asked, 1 cannot start, 3 another one runs over the same state folder."""

    help = "Run the services, the web process, the conductor, the workers and the local engines until Ctrl-C."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Flags."""
        parser.add_argument("--port", type=int, help="web port (default: the first free one from 8000)")
        parser.add_argument("--quiet", action="store_true", help="keep the processes' lines to var/logs")
        parser.add_argument(
            "--engines", nargs="+", default=(), metavar="CLUSTER", help="run no other cluster's engines"
        )
        parser.add_argument("--max-len", type=positive, default=MAX_TOKENS, help="tokens of a sequence (default: 1024)")
        parser.add_argument("--with-parent", action="store_true", help="stop when the process that started this ends")
        parser.add_argument(STARTED_FLAG, action="store_true", help="this command started the services (internal)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Start, wait, stop all that was started."""
        second = (
            f"`manage.py up` or `make demo` already runs over {settings.STATE_DIR}; end it first, or set SLIPWAY_STATE"
        )
        try:
            with exclusive(settings.RUNTIME_DIR / "up.lock", timeout_s=0, message=second):
                self._up(options)
        except AlreadyRunning as error:
            self.stderr.write(str(error))
            raise SystemExit(SECOND) from error
        except ControlPlaneError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(f"{settings.STATE_DIR} cannot be written: {error}; free space or mend it") from error

    def _up(self, options: dict[str, Any]) -> None:
        say = self._say
        port = choose_web_port(options["port"])
        started = services_ready(say, started_before=options["services_started"])
        try:
            migrate(say)
            stack = Stack(
                web_port=port,
                terminal=None if options["quiet"] else sys.stdout,
                say=say,
                engines=LocalEngines(clusters=options["engines"], max_tokens=options["max_len"]),
                parent=os.getppid() if options["with_parent"] else None,
            )
            url = f"http://localhost:{port}"
            write_atomically(settings.RUNTIME_DIR / "web.url", url.encode(), mode=0o644)
            asyncio.run(stack.run(started=lambda: say(f"everything is started: {url} (Ctrl-C stops it)")))
            say("stopping")
        finally:
            if started:
                services_stop(settings.STATE_DIR)
        say("stopped; nothing that was started still runs")

    def _say(self, line: str) -> None:
        self.stdout.write(f"slipway │ {line}")
        self.stdout.flush()
