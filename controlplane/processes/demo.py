"""The demonstration: seed, start everything, train a run to its end, say what it came to."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from django.conf import settings
from django.db import Error, close_old_connections

from controlplane.errors import Unavailable
from controlplane.models import Replica, Run, User
from controlplane.processes.bootstrap import STARTED_FLAG
from controlplane.processes.demo_report import progress_line, step_line, summary_lines
from controlplane.processes.demo_spec import DemoTask, demo_spec
from controlplane.processes.launch import log_tail
from controlplane.processes.output import Say
from controlplane.processes.progress import Progress
from controlplane.processes.seed import PROJECT, Seeded, seed_demo
from controlplane.selectors.run_summary import RunSummary, run_summary
from controlplane.services.events import SYSTEM, Actor
from controlplane.services.runs import run_create, run_stop
from controlplane.states import ActorKind, ReplicaState, RunState, StepState

READY_TIMEOUT_S = 180
STALL_S = 600
_ENDED = {RunState.COMPLETED, RunState.STOPPED, RunState.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What was asked for."""

    task: DemoTask
    seed: int
    port: int
    steps: int | None = None
    moe: bool = False
    model_folder: Path | None = None


class DemoFault(Unavailable):
    """The demonstration cannot go on. The message says what to look at."""

    code = "demo_fault"
    retryable = False


class Demo:
    """One demonstration over running services and current tables."""

    def __init__(self, plan: DemoPlan, *, say: Say, progress: Progress, owns_services: bool) -> None:
        """`owns_services`: this demonstration started the services, so they are to end with it, however it ends."""
        self._plan = plan
        self._owns_services = owns_services
        self._say = say
        self._progress = progress
        self._up: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the dashboard is."""
        return f"http://localhost:{self._plan.port}"

    def seed(self) -> tuple[Seeded, Run]:
        """Everything the run needs, and the run itself. Raises: ControlPlaneError."""
        plan = self._plan
        seeded = seed_demo(say=self._say, model_folder=plan.model_folder, moe=plan.moe)
        for old in Run.objects.filter(project__slug=PROJECT).exclude(state__in=_ENDED):
            self._say(f"stopping run {old.name!r}, which an earlier demonstration left unfinished")
            run_stop(run=old, actor=SYSTEM, reason="a new demonstration starts")
        spec = demo_spec(
            task=plan.task, model=seeded.model.slug, clusters=seeded.clusters, seed=plan.seed, steps=plan.steps
        )
        engineer = User.objects.get(username="engineer")
        number = Run.objects.filter(project=seeded.project).count() + 1
        run = run_create(
            project=seeded.project,
            name=f"{plan.task.value} {number}",
            spec=spec,
            actor=Actor(ActorKind.USER, engineer.username),
            user=engineer,
        )
        return seeded, run

    @contextlib.contextmanager
    def everything_up(self) -> Iterator[None]:
        """`manage.py up`, quietly, for as long as the block lasts."""
        argv = [sys.executable, "-u", str(settings.BASE_DIR / "manage.py"), "up", "--quiet", "--with-parent"]
        argv += [STARTED_FLAG] if self._owns_services else []
        log = settings.STATE_DIR / "logs" / "up.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._up = subprocess.Popen(
                [*argv, "--port", str(self._plan.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches us alone; we stop it in order
            )
        try:
            yield
        finally:
            self._up.terminate()
            try:
                self._up.wait(60)
            except subprocess.TimeoutExpired:
                self._up.kill()
            self._up = None

    def wait_ready(self, seeded: Seeded) -> None:
        """Until the web process answers and every rollout replica reports. Raises: DemoFault."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            self._check_alive()
            ready = Replica.objects.filter(
                cluster__project=seeded.project,
                cluster__slug__in=seeded.clusters,
                state__in=[ReplicaState.READY, ReplicaState.RECONCILING],
            ).count()
            web = self._web_answers()
            self._progress.show(f"web {'ready' if web else 'starting'}, engines {ready}/{len(seeded.clusters)}")
            if web and ready >= len(seeded.clusters):
                self._progress.clear()
                return
            time.sleep(0.5)
        raise DemoFault(f"not everything was ready within {READY_TIMEOUT_S} s; look into {settings.STATE_DIR}/logs")

    def follow(self, run: Run) -> RunSummary:
        """A line for each step until the run ends. Raises: DemoFault when it fails, stops or stands still."""
        total = sum(stage.spec["steps"] for stage in run.stages.all())
        started, shown, moved = time.monotonic(), 0, time.monotonic()
        while True:
            self._check_alive()
            with contextlib.suppress(Error):  # the database may be away for a moment
                shown_before = shown
                shown = self._show_steps(run, shown, total, started)
                run.refresh_from_db()
                if run.state in _ENDED:
                    break
                moved = time.monotonic() if shown > shown_before else moved
                self._progress.show(progress_line(run, total=total))
            if time.monotonic() - moved > STALL_S:
                raise DemoFault(f"no step in {STALL_S} s; look into {settings.STATE_DIR}/logs and at {self.url}")
            time.sleep(0.5)
            close_old_connections()
        self._progress.clear()
        if run.state != RunState.COMPLETED:
            raise DemoFault(f"the run is {run.state}: {run.state_reason or 'without a reason'}; its page says more")
        return self._await_delivery(run, started)

    def _await_delivery(self, run: Run, started: float) -> RunSummary:
        """The last version may still be on its way to a replica when the run is complete."""
        deadline = time.monotonic() + 60
        summary = run_summary(run)
        while not all(cluster.at_head for cluster in summary.clusters) and time.monotonic() < deadline:
            self._progress.show("shipping the last version")
            time.sleep(0.5)
            summary = run_summary(run)
        self._progress.clear()
        for line in summary_lines(summary, elapsed_s=time.monotonic() - started):
            self._say(line)
        return summary

    def _show_steps(self, run: Run, shown: int, total: int, started: float) -> int:
        steps = run.steps.filter(state=StepState.PUBLISHED, number__gt=shown).select_related("version")
        for step in steps.order_by("number"):
            self._progress.clear()
            self._say(step_line(step, total=total, elapsed_s=time.monotonic() - started))
            shown = step.number
        return shown

    def _web_answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._plan.port}/healthz", timeout=2).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _check_alive(self) -> None:
        if self._up is not None and self._up.poll() is not None:
            tail = log_tail(settings.STATE_DIR / "logs" / "up.log", lines=12)
            raise DemoFault(f"the supervisor ended; the end of {settings.STATE_DIR}/logs/up.log:\n{tail}")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


def interrupt_on_signals() -> None:
    """SIGINT and SIGTERM raise Interrupted, so that everything is stopped in order."""

    def raise_interrupted(number: int, frame: FrameType | None) -> Any:
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interrupted)
