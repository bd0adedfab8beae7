"""The lane's demonstration from beginning to end: measure, live through cycles, sabotage one, measure again."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

from django.db import close_old_connections

from controlplane.errors import Conflict
from controlplane.models import Alert, CadenceSlot, Lane, ServedVersion
from controlplane.processes.background import Background
from controlplane.processes.demo import runs_stop_unfinished
from controlplane.processes.errors import DemoFault
from controlplane.processes.lane_demo.cycles import POLL_S, STALL_S, Cycle, Follower
from controlplane.processes.lane_demo.population import heldout_personas, people
from controlplane.processes.lane_demo.report import LaneSummary, cycle_lines, summary_lines
from controlplane.processes.lane_demo.traffic import Crowd, Doors
from controlplane.processes.lane_demo.truth import Sample, fact_gain, sample_replies, satisfaction_gain
from controlplane.processes.output import Say
from controlplane.processes.progress import Progress
from controlplane.processes.seed_lane import SOURCE, lane_access, lane_cadence, signal_map
from controlplane.services.alerts import alert_resolve
from controlplane.services.cadence import cadence_resume, cadence_update
from controlplane.services.events import Actor
from controlplane.services.promotions import lane_rollback
from controlplane.services.residency import resident_somewhere
from controlplane.services.signals import signal_map_publish
from controlplane.services.slots import slot_open, slot_skip
from controlplane.states import ActorKind, Arm
from rl_core.environments import short_replies
from rl_core.types import Split

PROMOTIONS = 3
MOST_CYCLES = 6
INTERVAL_S = 10.0
DEMO = Actor(ActorKind.SYSTEM, "demonstration")


@dataclass(slots=True)
class LaneDemo:
    """One demonstration over running services and current tables."""

    lane: Lane
    seed: int
    say: Say
    progress: Progress
    background: Background
    summary: LaneSummary = field(default_factory=LaneSummary)

    def begin_anew(self) -> None:
        """Back to the version that the lane began with, to the true signal map, and nothing under way."""
        lane = self.lane
        runs_stop_unfinished(project=lane.project, say=self.say)
        for alert in Alert.objects.filter(lane=lane, holds=True, resolved_at__isnull=True):
            alert_resolve(alert=alert, user=None, actor=DEMO, reason="a new demonstration begins")
        self._stand_still()
        signal_map_publish(project=lane.project, content=signal_map(), author=None, actor=DEMO)
        served = ServedVersion.objects.filter(lane=lane, arm=Arm.PROMOTED).select_related("version")
        first = served.order_by("created_at")[0].version
        if first.pk != lane.promoted_version_id:
            self.say(f"rolling lane {lane.slug} back to {first}, with which it began")
            lane_rollback(lane=lane, version=first, actor=DEMO, reason="a new demonstration begins")

    def run(self) -> LaneSummary:
        """All of it, with everything running. Raises: DemoFault."""
        started = time.monotonic()
        self._wait_serving()
        access = lane_access(self.lane.project)
        doors = Doors(
            url=self.background.url,
            lane=self.lane.slug,
            gateway_key=access.gateway_key,
            source=SOURCE,
            source_secret=access.source_secret,
        )
        tasks = short_replies.build_task_set()
        questions = [str(task.input["question"]) for task in tasks.split(Split.TRAIN)]
        first = self._sample(doors)
        with Crowd(doors=doors, people=people(self.seed), questions=questions, seed=self.seed) as crowd:
            try:
                self._live(crowd)
            finally:
                self._stand_still()
        last = self._sample(doors)
        self.summary.satisfaction = satisfaction_gain(first, last, heldout_personas(self.seed))
        self.summary.facts = fact_gain(first, last, tasks.split(Split.HELDOUT))
        for line in summary_lines(self.summary, tally=crowd.tally, elapsed_s=time.monotonic() - started):
            self.say(line)
        return self.summary

    def _live(self, crowd: Crowd) -> None:
        """Cycles until enough were promoted and one was sabotaged, or too many went by."""
        began = self._last_slot()
        cadence_update(
            lane=self.lane, cadence=lane_cadence(interval_s=INTERVAL_S), actor=DEMO, reason="slots open by themselves"
        )
        if self.lane.paused_at is not None:
            cadence_resume(lane=self.lane, actor=DEMO, reason="a demonstration begins")
        follower = Follower(lane=self.lane, crowd=crowd, background=self.background, progress=self.progress)
        summary = self.summary
        while len(summary.cycles) < MOST_CYCLES and not (summary.promotions >= PROMOTIONS and summary.sabotaged):
            # The mistake comes once the lane has something to lose.
            spoil = summary.promotions > 0 and not summary.sabotaged
            cycle = self._cycle(follower, after=began + len(summary.cycles), spoil=spoil)
            summary.cycles.append(cycle)
            for line in cycle_lines(cycle):
                self.say(line)
        numbers = [cycle.slot.number for cycle in summary.cycles]
        since = CadenceSlot.objects.get(lane=self.lane, number=numbers[0]).created_at
        raised = Alert.objects.filter(lane=self.lane, created_at__gte=since).order_by("created_at")
        summary.alerts = [f"{alert.kind}: {alert.detail.get('reason', alert.subject)}" for alert in raised]

    def _cycle(self, follower: Follower, *, after: int, spoil: bool) -> Cycle:
        """One slot; a spoilt one with the signal map inverted, which is put right again whatever happens."""
        if not spoil:
            return follower.cycle(after=after)
        self._publish_map(inverted=True)
        try:
            return follower.cycle(after=after, sabotaged=True)
        finally:
            self._publish_map(inverted=False)

    def _publish_map(self, *, inverted: bool) -> None:
        signal_map_publish(project=self.lane.project, content=signal_map(inverted=inverted), author=None, actor=DEMO)

    def _last_slot(self) -> int:
        newest = self.lane.cadence_slots.order_by("-number").first()
        return newest.number if newest else 0

    def _stand_still(self) -> None:
        """Open no slot by itself any more, and give up the one that is under way."""
        cadence_update(lane=self.lane, cadence=lane_cadence(), actor=DEMO, reason="slots open by hand")
        if slot_open(self.lane) is not None:
            with contextlib.suppress(Conflict):  # it ended meanwhile
                slot_skip(lane=self.lane, actor=DEMO, reason="the demonstration is over")

    def _wait_serving(self) -> None:
        """Until a replica holds the version that is to answer. Raises: DemoFault."""
        deadline = time.monotonic() + STALL_S
        while time.monotonic() < deadline:
            self.background.check_alive()
            self.lane.refresh_from_db()
            version = self.lane.promoted_version
            if version and self.lane.rollback_to_id is None and resident_somewhere(lane=self.lane, version=version):
                self.progress.clear()
                return
            self.progress.show("loading the lane's version")
            time.sleep(POLL_S)
            close_old_connections()
        raise DemoFault(f"lane {self.lane.slug} has no replica that holds its version; look at {self.background.url}")

    def _sample(self, doors: Doors) -> Sample:
        """What the promoted version says to the held-out questions."""
        version = Lane.objects.select_related("promoted_version").get(pk=self.lane.pk).promoted_version
        sample = sample_replies(
            doors=doors,
            version=str(version),
            tasks=short_replies.build_task_set().split(Split.HELDOUT),
            seed=self.seed,
            show=self.progress.show,
        )
        self.progress.clear()
        return sample
