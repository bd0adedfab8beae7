"""`manage.py demo_lane`: watch a lane learn from a SIMULATED population of users, on this machine."""

from __future__ import annotations

from typing import Any

from controlplane.management.demonstration import DemonstrationCommand
from controlplane.models import Lane
from controlplane.processes.background import Background
from controlplane.processes.lane_demo.story import PROMOTIONS, LaneDemo
from controlplane.processes.progress import Progress
from controlplane.processes.seed import SERVING_CLUSTER, seed_demo
from controlplane.processes.seed_lane import LANE


class Command(DemonstrationCommand):
    """Exit codes: 0 promotions, a shown gain and a stopped sabotage; 1 not all of it; 2 a fault; 130 interrupted."""

    help = "Let simulated users use a lane, and show that its cadence serves them better and stops a spoilt cycle."
    # One engine with two weight slots is enough: it serves both arms, and evaluates for the gate.
    up_flags = ("--engines", SERVING_CLUSTER, "--max-len", "256")

    def plan(self, options: dict[str, Any]) -> str:
        """What is about to happen."""
        return (
            f"seed, start everything, let SIMULATED users (seed {options['seed']}) use lane {LANE} until {PROMOTIONS} "
            "cycles of its cadence were promoted, spoil one more, measure before and after"
        )

    def demonstrate(self, options: dict[str, Any], *, background: Background, progress: Progress) -> bool:
        """Live through the cycles."""
        seeded = seed_demo(say=self.say)
        lane = Lane.objects.select_related("project", "promoted_version").get(project=seeded.project, slug=LANE)
        demo = LaneDemo(lane=lane, seed=options["seed"], say=self.say, progress=progress, background=background)
        demo.begin_anew()
        with background.running():
            self.say("starting the web process, the conductor, the workers and one engine")
            background.wait_ready(project=seeded.project, clusters=[SERVING_CLUSTER])
            self.greet(f"{background.url}/lanes/{lane.pk}/", seeded.logins)
            summary = demo.run()
            self.stay(f"{background.url}/lanes/{lane.pk}/", options)
            return summary.shown
