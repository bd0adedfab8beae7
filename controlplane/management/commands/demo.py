"""`manage.py demo`: watch a real model learn a tool-use task on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from controlplane.management.demonstration import DemonstrationCommand, positive
from controlplane.processes.background import Background
from controlplane.processes.demo import Demo, DemoPlan
from controlplane.processes.demo_spec import MAX_CONTEXT_TOKENS, STEPS, DemoTask
from controlplane.processes.errors import DemoFault
from controlplane.processes.progress import Progress
from controlplane.processes.stack import sandbox_refusal


class Command(DemonstrationCommand):
    """Exit codes: 0 a gain (both intervals above zero), 1 none, 2 a fault, 130 interrupted."""

    help = "Train a small model by asynchronous RL on this machine and say whether it learned."

    def add_arguments(self, parser: CommandParser) -> None:
        """Flags."""
        super().add_arguments(parser)
        parser.add_argument("--task", type=DemoTask, choices=list(DemoTask), default=DemoTask.WORD_PROBLEMS)
        parser.add_argument("--steps", type=positive, help="optimiser steps (default: 18, code repair 22)")
        parser.add_argument("--moe", action="store_true", help="a mixture of experts upcycled from the model")
        parser.add_argument("--model", type=Path, help="another Hugging Face folder (Llama or Mixtral form)")

    def plan(self, options: dict[str, Any]) -> str:
        """How many steps of what; a fault where the machine cannot isolate what would run."""
        task = options["task"]
        if task is DemoTask.CODE_REPAIR and (refusal := sandbox_refusal()):
            raise DemoFault(f"code repair runs model-written code, and this machine cannot isolate it:\n{refusal}")
        steps = options["steps"] or STEPS[task]
        return f"seed, start everything, train {steps} steps of {task.value} (seed {options['seed']}), sum up"

    def demonstrate(self, options: dict[str, Any], *, background: Background, progress: Progress) -> bool:
        """Train to the end of the run."""
        plan = DemoPlan(
            task=options["task"],
            seed=options["seed"],
            steps=options["steps"],
            moe=options["moe"],
            model_folder=options["model"],
        )
        demo = Demo(plan, say=self.say, progress=progress, background=background)
        seeded, run = demo.seed()
        with background.running("--max-len", str(MAX_CONTEXT_TOKENS), "--engines", *seeded.engines):
            self.say("starting the web process, the conductor, the workers and the engines")
            background.wait_ready(project=seeded.project, clusters=seeded.clusters)
            self.greet(f"{background.url}/runs/{run.pk}/", seeded.logins)
            summary = demo.follow(run)
            if sys.stdout.isatty():
                self.say("next: watch a lane learn from its (simulated) users: make demo-lane")
            self.stay(background.url, options)
            return summary.gained
