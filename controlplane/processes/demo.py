"""The demonstration: seed, start everything, train a run to its end, say what it came to."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.db import Error, close_old_connections

from controlplane.models import Project, Run, User
from controlplane.processes.background import Background
from controlplane.processes.demo_report import progress_line, step_line, summary_lines
from controlplane.processes.demo_spec import DemoTask, demo_spec
from controlplane.processes.errors import DemoFault
from controlplane.processes.output import Say
from controlplane.processes.progress import Progress
from controlplane.processes.seed import Seeded, seed_demo
from controlplane.selectors.run_summary import RunSummary, run_summary
from controlplane.services.events import SYSTEM, Actor
from controlplane.services.runs import run_create, run_stop
from controlplane.states import ActorKind, RunState, StepState

STALL_S = 600
_ENDED = {RunState.COMPLETED, RunState.STOPPED, RunState.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What was asked for."""

    task: DemoTask
    seed: int
    steps: int | None = None
    moe: bool = False
    model_folder: Path | None = None


class Demo:
    """One demonstration over running services and current tables."""

    def __init__(self, plan: DemoPlan, *, say: Say, progress: Progress, background: Background) -> None:
        self._plan = plan
        self._say = say
        self._progress = progress
        self._background = background

    def seed(self) -> tuple[Seeded, Run]:
        """Everything the run needs, and the run itself. Raises: ControlPlaneError."""
        plan = self._plan
        seeded = seed_demo(say=self._say, model_folder=plan.model_folder, moe=plan.moe)
        runs_stop_unfinished(project=seeded.project, say=self._say)
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

    def follow(self, run: Run) -> RunSummary:
        """A line for each step until the run ends. Raises: DemoFault when it fails, stops or stands still."""
        total = sum(stage.spec["steps"] for stage in run.stages.all())
        started, shown, moved = time.monotonic(), 0, time.monotonic()
        while True:
            self._background.check_alive()
            with contextlib.suppress(Error):  # the database may be away for a moment
                shown_before = shown
                shown = self._show_steps(run, shown, total, started)
                run.refresh_from_db()
                if run.state in _ENDED:
                    break
                moved = time.monotonic() if shown > shown_before else moved
                self._progress.show(progress_line(run, total=total))
            if time.monotonic() - moved > STALL_S:
                raise DemoFault(
                    f"no step in {STALL_S} s; look into {settings.STATE_DIR}/logs and at {self._background.url}"
                )
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


def runs_stop_unfinished(*, project: Project, say: Say) -> None:
    """End the runs that an interrupted demonstration left, so that they take nothing from the new one."""
    for old in Run.objects.filter(project=project).exclude(state__in=_ENDED):
        say(f"stopping run {old.name!r}, which an earlier demonstration left unfinished")
        run_stop(run=old, actor=SYSTEM, reason="a new demonstration starts")
