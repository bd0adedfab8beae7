"""Reads for the pages: how what answers behaves against its incumbent, as the monitors look at it."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.models import Lane, PolicyVersion
from controlplane.selectors.version_outcomes import Behaviour, behaviours_of, gains_of
from controlplane.services.cadence import cadence_of
from controlplane.services.monitors import ALPHA, LENGTH, LENGTH_THRESHOLDS, MEMORY, compared
from controlplane.states import Arm
from rl_core.shipping.canary import effect
from rl_core.shipping.specs import MonitorSpec

NEWEST = 4000  # answers of each version: enough to see, and quick to read


@dataclass(frozen=True, slots=True)
class Watched:
    """One behaviour of a version against a baseline: means, the difference with its interval, and how many answers.

    Length is compared relative to the baseline's, as the monitor does.
    """

    key: str
    before: float | None
    now: float | None
    difference: float | None
    low: float | None
    high: float | None
    threshold: float
    answers_before: int
    answers_now: int
    minimum: int

    @property
    def enough(self) -> bool:
        """Whether both sides have as many answers as the monitor wants."""
        return min(self.answers_before, self.answers_now) >= self.minimum

    @property
    def moved(self) -> bool:
        """Whether it is shown to have moved, and by as much as calls a person."""
        if not self.enough or self.low is None or self.high is None or self.difference is None:
            return False
        return (self.low > 0 or self.high < 0) and abs(self.difference) >= self.threshold

    @property
    def relative(self) -> bool:
        """Whether the difference is a share of the baseline's mean."""
        return self.key == LENGTH


@dataclass(frozen=True, slots=True)
class Divergence:
    """What gates measured over the last promotions, and what users said."""

    promotions: int
    gate: float
    users: float | None
    low: float | None
    high: float | None
    threshold: float

    @property
    def apart(self) -> bool:
        """Whether gates gained more than users can have."""
        return self.high is not None and self.gate > 0 and self.gate - self.high > self.threshold


@dataclass(frozen=True, slots=True)
class WatchView:
    """The first comparison that the monitors make, a canary's before any other; None before a second version."""

    version: PolicyVersion | None
    baseline: PolicyVersion | None
    rows: list[Watched]
    divergence: Divergence | None
    hold: bool


def watch_view(lane: Lane) -> WatchView:
    """Look as the monitors do, at fewer answers; nothing is written."""
    spec = cadence_of(lane)
    monitors = spec.monitors if spec else MonitorSpec()
    pairs = compared(lane)
    if not pairs:
        return WatchView(None, None, [], None, monitors.hold)
    version, baseline = pairs[0]
    keys = (*monitors.behaviours, LENGTH)
    seen = behaviours_of(lane=lane, version=version, baseline=baseline, keys=keys, newest=NEWEST)
    rows = [_watched(one, monitors) for one in seen]
    return WatchView(version, baseline, rows, _divergence(lane, monitors), monitors.hold)


def _watched(seen: Behaviour, spec: MonitorSpec) -> Watched:
    found = effect(seen.outcomes, alpha=ALPHA / MEMORY)
    unit = max(found.mean_promoted or 0.0, 1.0) if seen.key == LENGTH else 1.0
    difference, low, high = (
        None if value is None else value / unit for value in (found.difference, found.low, found.high)
    )
    return Watched(
        key=seen.key,
        before=found.mean_promoted,
        now=found.mean_canary,
        difference=difference,
        low=low,
        high=high,
        threshold=spec.threshold * (LENGTH_THRESHOLDS if seen.key == LENGTH else 1),
        answers_before=seen.answers.get(Arm.PROMOTED.value, 0),
        answers_now=seen.answers.get(Arm.CANARY.value, 0),
        minimum=spec.minimum,
    )


def _divergence(lane: Lane, spec: MonitorSpec) -> Divergence | None:
    gains = gains_of(lane=lane, count=MEMORY)
    if not gains:
        return None
    found = effect([*gains[0].before, *gains[-1].after], alpha=ALPHA / MEMORY)
    gate = sum(one.gate for one in gains)
    return Divergence(len(gains), gate, found.difference, found.low, found.high, spec.divergence)
