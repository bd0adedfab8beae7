"""Reads for the pages: what a signal map would have made of the last day, beside what the present one makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connection

from controlplane.models import Project, SignalDefinition, SignalMap
from controlplane.selectors.reward_sql import rewards_query
from controlplane.services.signals import SignalMapContent

BACK = timedelta(days=1)
NEWEST = 20_000
BINS = 10

# The answers of the last day that a person could have said something of. One row an answer.
_ANSWERS = """
g.id IN (
    SELECT n.id FROM controlplane_generation n JOIN controlplane_lane l ON l.id = n.lane_id
    WHERE l.project_id = %(project)s AND n.outcome = 'answered' AND n.erased_at IS NULL
      AND n.created_at > now() - %(back)s
    ORDER BY n.created_at DESC LIMIT %(newest)s
)
"""
_COUNT = "SELECT count(*) FROM controlplane_generation g WHERE {generations}"
# Rewards lie in [-1, 1]; the last bin holds 1 itself.
_BINNED = """
SELECT least(floor((r.reward + 1) / 2 * %(bins)s), %(bins)s - 1)::int AS bin, count(*), sum(r.reward)::float
FROM ({rewards}) r GROUP BY 1
"""


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a map gives the answers: how many in each bin of [-1, 1], how many at all, and their mean."""

    bins: list[int]
    rewarded: int
    mean: float | None


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin of the distribution, under both maps."""

    low: float
    high: float
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Preview:
    """Both maps on the same answers. `before` is None while no map is published."""

    answers: int
    before: Rewards | None
    after: Rewards

    @property
    def bins(self) -> list[Bin]:
        """The distribution, from the worst to the best."""
        width = 2 / BINS
        old = self.before.bins if self.before else [0] * BINS
        return [
            Bin(-1 + width * index, -1 + width * (index + 1), before, after)
            for index, (before, after) in enumerate(zip(old, self.after.bins, strict=True))
        ]

    @property
    def share_before(self) -> float | None:
        """The share of answers that the map in force rewards."""
        return self.before.rewarded / self.answers if self.before is not None and self.answers else None

    @property
    def share_after(self) -> float | None:
        """The share of answers that the new map rewards."""
        return self.after.rewarded / self.answers if self.answers else None


def map_preview(project: Project, *, before: SignalMapContent | None, after: SignalMapContent) -> Preview:
    """Reward the last day's answers under both maps."""
    base: dict[str, Any] = {"project": project.pk, "back": BACK, "newest": NEWEST}
    with connection.cursor() as cursor:
        cursor.execute(_COUNT.format(generations=_ANSWERS), base)
        answers = int(cursor.fetchone()[0])
    old = _rewards(before, base) if before is not None else None
    return Preview(answers, old, _rewards(after, base))


def _rewards(content: SignalMapContent, base: dict[str, Any]) -> Rewards:
    rewards, parameters = rewards_query(_ANSWERS, content)
    with connection.cursor() as cursor:
        cursor.execute(_BINNED.format(rewards=rewards), {**base, **parameters, "bins": BINS})
        rows = cursor.fetchall()
    bins = [0] * BINS
    total = 0.0
    for index, count, sum_ in rows:
        bins[max(0, min(BINS - 1, index))] += count
        total += sum_
    rewarded = sum(bins)
    return Rewards(bins, rewarded, total / rewarded if rewarded else None)


def signals_of(project: Project) -> list[SignalDefinition]:
    """The project's signals, by name."""
    return list(SignalDefinition.objects.filter(project=project).order_by("slug"))


def map_versions(project: Project) -> list[SignalMap]:
    """Published maps, the newest first."""
    return list(SignalMap.objects.filter(project=project).select_related("author").order_by("-number")[:50])
