"""Who is not to be listened to: programs, and people who rate like nobody else."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from rl_core.windows.shrinkage import UNKNOWN, all_moments, group_moments

HOUR_S = 3600.0
EXACT = 1e-6  # rewards that differ by less than this are the same


def busy_actors(events: Iterable[tuple[str, float]], *, an_hour: int) -> set[str]:
    """Actors with more than `an_hour` events within any hour; 0 is off. An event is (actor, seconds since anything)."""
    if not an_hour:
        return set()
    recent: dict[str, deque[float]] = defaultdict(deque)
    busy = set()
    for actor, at in sorted(events, key=lambda event: event[1]):
        times = recent[actor]
        times.append(at)
        while at - times[0] >= HOUR_S:
            times.popleft()
        if actor != UNKNOWN and len(times) > an_hour:
            busy.add(actor)
    return busy


def outlying_actors(rewards: Sequence[tuple[str, float]], *, deviations: float, minimum: int) -> set[str]:
    """Actors whose mean reward, over at least `minimum`, is too far from that of all the others; 0 deviations is off.

    The standard deviation of a mean of n is √(τ² + σ²/n), both measured without the actor (`shrinkage`): being strict
    is no outlier where people differ. Where the others do not differ at all, nothing tells what would be far.
    """
    if not deviations:
        return set()
    moments = group_moments([reward for _, reward in rewards], [actor for actor, _ in rewards])
    everybody = all_moments(moments.values())
    outlying = set()
    for actor, own in moments.items():
        others = everybody.plus(own, -1)
        components = others.components()
        deviation = math.sqrt(components.between + components.within / own.count)
        if own.count >= minimum and deviation > EXACT and abs(own.mean - others.mean) > deviations * deviation:
            outlying.add(actor)
    return outlying
