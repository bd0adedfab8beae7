"""Reads for the pages: who worked when, so that one sees what overlaps and what waits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q
from django.utils import timezone

from controlplane.models import Attempt, PolicyVersion, Run, Transfer
from controlplane.states import WorkKind

_LANES = (WorkKind.ROLLOUT, WorkKind.SCORE, WorkKind.TRAIN, WorkKind.TRANSFER)
_MAX_BARS = 400
_MIN_WIDTH = 0.25


@dataclass(frozen=True, slots=True)
class Bar:
    """One attempt, in percent of the window."""

    left: float
    width: float
    state: str
    title: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Attempts by kind of work over the same window."""

    start: datetime
    end: datetime
    lanes: list[tuple[str, list[Bar]]]

    @property
    def length_s(self) -> float:
        """The window in seconds."""
        return (self.end - self.start).total_seconds()


def run_timeline(run: Run, window: timedelta = timedelta(minutes=5)) -> Timeline | None:
    """The attempts of the run's last minutes; None when it had none."""
    versions = PolicyVersion.objects.filter(lineage_id=run.lineage_id)
    transfers = Transfer.objects.filter(version__in=versions)
    mine = Q(unit__run=run) | Q(unit__kind=WorkKind.TRANSFER, unit__ref__in=transfers.values("pk"))
    newest = (
        Attempt.objects.filter(mine, unit__kind__in=_LANES)
        .select_related("unit")
        .defer("traceback")
        .order_by("-created_at")[:_MAX_BARS]
    )
    attempts = list(newest)
    if not attempts:
        return None
    now = timezone.now()
    end = max(attempt.finished_at or now for attempt in attempts)
    start = max(end - window, min(attempt.created_at for attempt in attempts))
    length_s = max((end - start).total_seconds(), 0.001)
    lanes: dict[str, list[Bar]] = {kind.value: [] for kind in _LANES}
    for attempt in attempts:
        stop = attempt.finished_at or now
        if stop < start:
            continue
        left = max(0.0, 100 * (attempt.created_at - start).total_seconds() / length_s)
        width = max(_MIN_WIDTH, 100 * (stop - start).total_seconds() / length_s - left)
        took_s = (stop - attempt.created_at).total_seconds()
        title = f"{attempt.unit.kind} attempt {attempt.number}: {attempt.state}, {took_s:.1f} s, {attempt.worker}"
        lanes[attempt.unit.kind].append(Bar(round(left, 2), round(width, 2), attempt.state, title))
    return Timeline(start, end, list(lanes.items()))
