"""What the commands of both demonstrations share: one at a time, services, current tables, an end in order."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.db import Error

from controlplane.errors import ControlPlaneError
from controlplane.processes.background import Background, interrupt_on_signals
from controlplane.processes.bootstrap import STARTED_FLAG, migrate, services_ready
from controlplane.processes.errors import AlreadyRunning, Interrupted
from controlplane.processes.progress import Progress
from controlplane.processes.records import exclusive
from controlplane.processes.services import services_stop
from controlplane.processes.stack import choose_web_port
from rl_core.errors import RlCoreError

SHOWN, NOT_SHOWN, FAULT, INTERRUPTED = 0, 1, 2, 130


class DemonstrationCommand(BaseCommand):
    """Exit codes: 0 shown what was to be shown, 1 not, 2 a fault, 130 interrupted."""

    requires_system_checks: list[str] = []
    up_flags: tuple[str, ...] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Flags."""
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--port", type=int, help="web port (default: the first free one from 8000)")
        parser.add_argument("--exit", action="store_true", help="stop everything at the end, as without a terminal")
        parser.add_argument(STARTED_FLAG, action="store_true", help="this command started the services (internal)")

    def plan(self, options: dict[str, Any]) -> str:
        """What is about to happen, in a line. Raises: DemoFault when it cannot."""
        raise NotImplementedError

    def demonstrate(self, options: dict[str, Any], *, background: Background, progress: Progress) -> bool:
        """Do it, over running services and current tables; whether it showed what it was to show."""
        raise NotImplementedError

    def handle(self, *args: Any, **options: Any) -> None:
        """Run it and end with its exit code."""
        interrupt_on_signals()
        second = (
            f"a demonstration or `manage.py up` runs over {settings.STATE_DIR} already; end it, or set SLIPWAY_STATE"
        )
        code = FAULT
        try:
            with exclusive(settings.RUNTIME_DIR / "demo.lock", timeout_s=0, message=second):
                with exclusive(settings.RUNTIME_DIR / "up.lock", timeout_s=0, message=second):
                    pass  # nobody runs; `up` takes this lock itself in a moment
                code = SHOWN if self._prepare(options) else NOT_SHOWN
        except Interrupted:
            code = INTERRUPTED
        except (AlreadyRunning, ControlPlaneError, RlCoreError) as error:
            self.stderr.write(f"\n{error}")
        except (Error, OSError, subprocess.SubprocessError) as error:
            self.stderr.write(
                f"\n{type(error).__name__}: {error}\nlook into {settings.STATE_DIR}/logs, or run: manage.py doctor"
            )
        raise SystemExit(code)

    def _prepare(self, options: dict[str, Any]) -> bool:
        port = choose_web_port(options["port"])
        plan = self.plan(options)
        if not options["services_started"]:  # said already, before the services made this command start anew
            self.say(f"plan: {plan}")
        started = services_ready(self.say, started_before=options["services_started"])
        try:
            migrate(self.say)
            progress = Progress(sys.stdout)
            background = Background(port=port, owns_services=started, progress=progress, flags=self.up_flags)
            return self.demonstrate(options, background=background, progress=progress)
        finally:
            if started:
                self.say("stopping")
                services_stop(settings.STATE_DIR)

    def greet(self, url: str, logins: dict[str, str]) -> None:
        """Where to look, and with which names."""
        self.say("")
        self.say(f"  open    {url}")
        for name, password in logins.items():
            self.say(f"  log in  {name} / {password}")
        self.say("")

    def stay(self, url: str, options: dict[str, Any]) -> None:
        """Serve on until Ctrl-C, with a terminal and unless told to end."""
        if options["exit"] or not sys.stdout.isatty():
            return
        self.say(f"serving on at {url} until Ctrl-C")
        try:
            signal.pause()
        except Interrupted:
            self.say("")

    def say(self, line: str) -> None:
        """Print a line at once."""
        self.stdout.write(line)
        self.stdout.flush()


def positive(text: str) -> int:
    """A flag's whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value
