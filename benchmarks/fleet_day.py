"""A day of versions: which of them each cluster serves when, what travels, and what it costs.

Steps end one after another; the trainer publishes the newest version that it has not begun when it is free, and a
cluster takes the newest that is on its way when it is free. Whoever is slower than the steps skips versions.
"""

from __future__ import annotations

import bisect
import itertools
import random
from dataclasses import dataclass
from typing import Final

from benchmarks.fleet_sync import Format, Plant, Synced

DAY_S: Final = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Of a cloud store, in dollars: a gigabyte (1e9) that leaves it for another region, and 1000 requests."""

    egress_gb: float = 0.02
    put_1000: float = 0.005
    get_1000: float = 0.0004


@dataclass(frozen=True, kw_only=True)
class Day:
    """What came of a day. `lag_*` is how far behind the newest version the clusters serve, mean over time and all.

    `behind_s`: how much older than the newest the served version is, mean over time; `paused_s` of one engine.
    """

    versions: int
    published: int
    served: int
    lag_mean: float
    lag_most: int
    behind_s: float
    paused_s: float
    egress_bytes: float
    dollars: float


def step_ends(*, shortest_s: float, longest_s: float, seed: int) -> list[float]:
    """When the steps of a day end: their durations are drawn evenly between the two."""
    draw = random.Random(seed)
    ends = itertools.accumulate(draw.uniform(shortest_s, longest_s) for _ in range(int(DAY_S / shortest_s) + 1))
    return [end for end in ends if end < DAY_S]


def day_of(plant: Plant, form: Format, synced: Synced, ends: list[float], *, prices: Prices) -> Day:
    """A day whose every version travels as `synced` did."""
    begun = _taken(ends, synced.published_s)
    served = [_taken([start for _, start in begun], service) for service in synced.serving_s.values()]
    serving = [
        [(begun[index][0], start + service) for index, start in taken]
        for taken, service in zip(served, synced.serving_s.values(), strict=True)
    ]
    lags = [_lag(ends, one) for one in serving]
    egress = sum(len(taken) for taken in served) * synced.egress_bytes / len(plant.clusters)
    puts = len(begun) * (synced.segments + 1)
    gets = sum(len(taken) for taken in served) * (synced.segments + 1)
    return Day(
        versions=len(ends),
        published=len(begun),
        served=min(len(taken) for taken in served),
        lag_mean=sum(mean for mean, _, _ in lags) / len(lags),
        lag_most=max(most for _, most, _ in lags),
        behind_s=sum(behind for _, _, behind in lags) / len(lags),
        paused_s=max(len(taken) for taken in served) * plant.swap_s,
        egress_bytes=egress,
        dollars=egress / 1e9 * prices.egress_gb + puts / 1000 * prices.put_1000 + gets / 1000 * prices.get_1000,
    )


def _taken(ready_s: list[float], service_s: float) -> list[tuple[int, float]]:
    """Which of the things that get ready one after another a busy server takes, and when: always the newest."""
    taken: list[tuple[int, float]] = []
    free_s, last = 0.0, -1
    while last + 1 < len(ready_s):
        newest = max(last + 1, bisect.bisect_right(ready_s, free_s) - 1)
        start_s = max(free_s, ready_s[newest])
        taken.append((newest, start_s))
        last, free_s = newest, start_s + service_s
    return taken


def _lag(ends: list[float], serving: list[tuple[int, float]]) -> tuple[float, int, float]:
    """Mean and largest lag in versions, and the mean age of what is served, over the day.

    Version 0 is the first step's; before it is served everybody serves what was there at the day's beginning (−1).
    """
    changes = sorted([(end, "head", index) for index, end in enumerate(ends)] + [(s, "serve", i) for i, s in serving])
    head = current = -1
    born = [0.0, *ends]
    last_s = lag_area = behind_area = 0.0
    most = 0
    for moment, what, index in [*changes, (DAY_S, "end", 0)]:
        until = min(moment, DAY_S)
        lag_area += (head - current) * (until - last_s)
        behind_area += (born[head + 1] - born[current + 1]) * (until - last_s)
        last_s = until
        if moment >= DAY_S:
            break
        head, current = (index, current) if what == "head" else (head, index)
        most = max(most, head - current)
    return lag_area / DAY_S, most, behind_area / DAY_S
