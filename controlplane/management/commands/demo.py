"""`manage.py demo`: watch a real model learn a tool-use task on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.db import Error

from controlplane.errors import ControlPlaneError
from controlplane.processes.bootstrap import STARTED_FLAG, migrate, services_ready
from controlplane.processes.demo import Demo, DemoPlan, Interrupted, interrupt_on_signals
from controlplane.processes.demo_spec import STEPS, DemoTask
from controlplane.processes.errors import AlreadyRunning
from controlplane.processes.progress import Progress
from controlplane.processes.records import exclusive
from controlplane.processes.services import services_stop
from controlplane.processes.stack import choose_web_port, sandbox_refusal
from rl_core.errors import RlCoreError

GAIN, NO_GAIN, FAULT, INTERRUPTED = 0, 1, 2, 130


class Command(BaseCommand):
    """Exit codes: 0 a gain (both intervals above zero), 1 none, 2 a fault, 130 interrupted."""

    help = "Train a small model by asynchronous RL on this machine and say whether it learned."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Flags."""
        parser.add_argument("--task", type=DemoTask, choices=list(DemoTask), default=DemoTask.WORD_PROBLEMS)
        parser.add_argument("--steps", type=_positive, help="optimiser steps (default: 18, code repair 22)")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--moe", action="store_true", help="a mixture of experts upcycled from the model")
        parser.add_argument("--model", type=Path, help="another Hugging Face folder (Llama or Mixtral form)")
        parser.add_argument("--port", type=int, help="web port (default: the first free one from 8000)")
        parser.add_argument("--exit", action="store_true", help="stop everything at the end, as without a terminal")
        parser.add_argument(STARTED_FLAG, action="store_true", help="this command started the services (internal)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run it and end with its exit code."""
        interrupt_on_signals()
        second = f"`make demo` or `manage.py up` runs over {settings.STATE_DIR} already; end it, or set SLIPWAY_STATE"
        code = FAULT
        try:
            with exclusive(settings.RUNTIME_DIR / "demo.lock", timeout_s=0, message=second):
                with exclusive(settings.RUNTIME_DIR / "up.lock", timeout_s=0, message=second):
                    pass  # nobody runs; `up` takes this lock itself in a moment
                code = self._demonstrate(options)
        except Interrupted:
            code = INTERRUPTED
        except (AlreadyRunning, ControlPlaneError, RlCoreError) as error:
            self.stderr.write(f"\n{error}")
        except (Error, OSError, subprocess.SubprocessError) as error:
            self.stderr.write(
                f"\n{type(error).__name__}: {error}\nlook into {settings.STATE_DIR}/logs, or run: manage.py doctor"
            )
        raise SystemExit(code)

    def _demonstrate(self, options: dict[str, Any]) -> int:
        plan = DemoPlan(
            task=options["task"],
            seed=options["seed"],
            port=choose_web_port(options["port"]),
            steps=options["steps"],
            moe=options["moe"],
            model_folder=options["model"],
        )
        if plan.task is DemoTask.CODE_REPAIR:
            refusal = sandbox_refusal()
            if refusal:
                self.stderr.write(
                    f"code repair runs model-written code, and this machine cannot isolate it:\n{refusal}"
                )
                return FAULT
        if not options["services_started"]:  # said already, before the services made this command start anew
            steps = plan.steps or STEPS[plan.task]
            self._say(
                f"plan: seed, start everything, train {steps} steps of {plan.task.value} (seed {plan.seed}), sum up"
            )
        started = services_ready(self._say, started_before=options["services_started"])
        try:
            migrate(self._say)
            demo = Demo(plan, say=self._say, progress=Progress(sys.stdout), owns_services=started)
            return self._run(demo, stay=not options["exit"])
        finally:
            if started:
                self._say("stopping")
                services_stop(settings.STATE_DIR)

    def _run(self, demo: Demo, *, stay: bool) -> int:
        seeded, run = demo.seed()
        with demo.everything_up():
            self._say("starting the web process, the conductor, the workers and the engines")
            demo.wait_ready(seeded)
            self._say("")
            self._say(f"  open    {demo.url}/runs/{run.pk}/")
            for name, password in seeded.logins.items():
                self._say(f"  log in  {name} / {password}")
            self._say("")
            summary = demo.follow(run)
            code = GAIN if summary.gained else NO_GAIN
            if stay and sys.stdout.isatty():
                self._say(f"serving on at {demo.url} until Ctrl-C")
                try:
                    signal.pause()
                except Interrupted:
                    self._say("")
            return code

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value
