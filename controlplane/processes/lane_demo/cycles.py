"""One turn of the lane's cadence, as the population lives through it: it asks, it waits, it meets the canary.

Nothing here moves the lane. The conductor opens slots, trains, gates, steps the canary and promotes; this follows the
rows, and has the simulated people ask when a lane's users would matter.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from django.db import Error, close_old_connections

from controlplane.models import CadenceSlot, Lane, Release, Step
from controlplane.processes.background import Background
from controlplane.processes.errors import DemoFault
from controlplane.processes.lane_demo.traffic import AT_ONCE, Crowd
from controlplane.processes.progress import Progress
from controlplane.states import CanaryVerdict, ReleaseState, SlotState

REPLIES = 320
MORE_REPLIES = 40
MOST_REPLIES = 640
POLL_S = 0.5
STALL_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """How a slot went. `satisfied` is the true share of satisfying replies of the version that it trained from."""

    slot: CadenceSlot
    sabotaged: bool
    replies: int
    satisfied: float
    elapsed_s: float

    @property
    def release(self) -> Release | None:
        """Its candidate's release, if it came so far."""
        return self.slot.release

    @property
    def step(self) -> Step | None:
        """What it trained."""
        return self.slot.run.steps.order_by("number").last() if self.slot.run else None

    @property
    def promoted(self) -> bool:
        """Whether its candidate now answers all users."""
        return self.release is not None and self.release.state == ReleaseState.PROMOTED

    @property
    def stopped_by(self) -> str:
        """`gate` or `canary` when one of them kept the candidate from the users; else nothing."""
        if self.release is None or self.promoted:
            return ""
        if self.release.gate.get("verdict") in {"fail", "inconclusive"}:
            return "gate"
        last = self.release.steps.order_by("-position").first()
        return "canary" if last is not None and last.verdict != CanaryVerdict.PASS else ""


class Follower:
    """Follows one lane's slots, one after the other."""

    def __init__(self, *, lane: Lane, crowd: Crowd, background: Background, progress: Progress) -> None:
        self._lane = lane
        self._crowd = crowd
        self._background = background
        self._progress = progress

    def cycle(self, *, after: int, sabotaged: bool = False) -> Cycle:
        """Until the first slot with a number above `after` has ended. Raises: DemoFault when nothing moves any more."""
        started, replies = time.monotonic(), self._crowd.tally.replies
        version = str(Lane.objects.select_related("promoted_version").get(pk=self._lane.pk).promoted_version)
        asked, seen, moved = 0, "", started
        while True:
            self._background.check_alive()
            under_way = self._crowd.under_way
            with contextlib.suppress(Error):  # the database may be away for a moment
                slot = self._slot(after)
                if slot is not None and slot.state in (SlotState.DONE, SlotState.SKIPPED):
                    break
                wanted = _questions(slot, asked=asked, under_way=under_way)
                self._crowd.ask(wanted)
                asked += wanted
                said = _phase(slot, asked=asked, under_way=under_way)
                moved, seen = (moved, seen) if said == seen else (time.monotonic(), said)
                self._progress.show(f"cycle {after + 1}: {said}")
            if time.monotonic() - moved > STALL_S:
                raise DemoFault(f"nothing moved in {STALL_S:.0f} s: {seen}; look at {self._background.url}/lanes/")
            time.sleep(POLL_S)
            close_old_connections()
        self._progress.clear()
        tally = self._crowd.tally
        return Cycle(
            slot=slot,
            sabotaged=sabotaged,
            replies=tally.replies - replies,
            satisfied=tally.satisfying[version] / max(1, tally.read[version]),
            elapsed_s=time.monotonic() - started,
        )

    def _slot(self, after: int) -> CadenceSlot | None:
        slots = self._lane.cadence_slots.filter(number__gt=after).select_related("run", "release")
        return slots.order_by("number").first()


def _questions(slot: CadenceSlot | None, *, asked: int, under_way: int) -> int:
    """How many more questions are asked now.

    While the machine trains or evaluates nobody asks. In a canary people go on asking, a few at a time.
    """
    if slot is None or slot.state == SlotState.OPEN:
        if asked == 0:
            return REPLIES
        return MORE_REPLIES if under_way == 0 and asked < MOST_REPLIES else 0
    in_canary = slot.release is not None and slot.release.state == ReleaseState.CANARY
    return max(0, AT_ONCE - under_way) if in_canary else 0


def _phase(slot: CadenceSlot | None, *, asked: int, under_way: int) -> str:
    """What is under way."""
    if slot is None or slot.state == SlotState.OPEN:
        waits = f"; {slot.reason}" if slot is not None and slot.reason else ""
        done = max(0, asked - under_way)  # those of the last canary may still be under way
        return f"{done} of {asked} questions answered and reacted to{waits}"
    release = slot.release
    if release is None:
        return f"training on the window; {slot.reason}"
    if release.state == ReleaseState.GATING:
        return f"gate: {_evaluated(release)}"
    if release.state == ReleaseState.CANARY:
        return f"canary: {_canary(release)}, {asked - under_way} visits so far"
    return f"the release is {release.state}"


def _evaluated(release: Release) -> str:
    """How far both evaluations are."""
    pairs = (("candidate", release.candidate_evaluation), ("incumbent", release.incumbent_evaluation))
    done = [
        f"{name} {row.groups.filter(mean_reward__isnull=False).count()}/{row.task_count}"
        for name, row in pairs
        if row is not None
    ]
    return ", ".join(done) or "loading the candidate"


def _canary(release: Release) -> str:
    """What the last look said."""
    step = release.steps.order_by("-position").first()
    if step is None or not step.analysis:
        return "no look yet"
    matured = step.analysis.get("matured", {})
    users = " and ".join(str(count) for count in matured.values())
    reasons = step.analysis.get("reasons") or [step.verdict]
    return f"{users} matured users, {reasons[0]}"
