"""Which task comes next: seeded laps over all of them, or by what may still be learned from each. Pure arithmetic.

A *draw* is a place in a stage's sequence of tasks, counted from 0. Draws `[s·P, (s+1)·P)` are meant for its step `s`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rl_core.specs import CurriculumKind, CurriculumSpec


@dataclass(frozen=True, slots=True)
class Tries:
    """What attempts at one task gave: how many there were, the sum of their rewards, and of the squares."""

    attempts: int
    rewards: float
    squares: float


@dataclass(frozen=True, slots=True)
class Difficulty:
    """What is believed of a task. `mean` and `variance` are shrunken towards the prior of a task never tried."""

    attempts: int
    mean: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What orders the draws of a stage: the run's seed, the stage's place, groups a step, tasks, and the rule."""

    seed: int
    stage: int
    prompts_per_step: int
    tasks: int
    spec: CurriculumSpec


UNTRIED = Tries(0, 0.0, 0.0)


def difficulty(tries: Tries, *, prior: float) -> Difficulty:
    """The posterior mean of a task's reward, and the variance that an attempt at it is expected to have.

    Rewards lie in [0, 1]. The prior is that of `prior` imagined attempts at a task of which one half succeeds; the
    variance mixes what was seen within the task with the prior's 1/4, by their counts.

    Source: the Beta-binomial posterior mean; for rewards that are 0 or 1 the variance is p(1−p) of the shrunken p.
    """
    n = tries.attempts + prior
    mean = (tries.rewards + prior / 2) / n
    second_moment = (tries.squares + prior / 2) / n
    return Difficulty(tries.attempts, mean, max(0.0, second_moment - mean * mean))


def settled(known: Difficulty, spec: CurriculumSpec) -> bool:
    """Whether a task is solved or hopeless for now: tried enough, and nearly always right or nearly always wrong."""
    return known.attempts >= spec.settled_after and not spec.hopeless_below < known.mean < spec.solved_from


def draws_of_step(course: Course, step: int, tries: Mapping[int, Tries]) -> list[int]:
    """Positions of the tasks drawn for a step, P of them. Equal arguments give equal draws.

    `uniform`: the next P of seeded laps. `variance`: a share of `explore` of all draws goes on along such laps, so that
    each task is looked at once a lap, which is `tasks / explore` draws long; the others are drawn without replacement,
    each with a chance proportional to its expected variance, from the tasks that are not settled. Where those do not
    suffice, the laps fill up.

    Source: weighted sampling without replacement by keys log(u)/w (Efraimidis and Spirakis 2006); a group whose
    attempts all get the same reward has no advantage, so its expected gradient grows with the variance.
    """
    first = step * course.prompts_per_step
    places = range(first, first + course.prompts_per_step)
    if course.spec.kind is CurriculumKind.UNIFORM:
        return [lap_task(course, place) for place in places]
    explored = {
        place: lap_task(course, math.floor(place * course.spec.explore)) for place in places if _looks(course, place)
    }
    left = [place for place in places if place not in explored]
    chosen = _by_variance(course, step, tries, without=set(explored.values()), count=len(left))
    filled = chosen + [lap_task(course, place) for place in left[len(chosen) :]]
    drawn = explored | dict(zip(left, filled, strict=True))
    return [drawn[place] for place in places]


def lap_task(course: Course, place: int) -> int:
    """Which task stands at a place of the laps: each pass over all tasks is a fresh seeded shuffle."""
    lap, offset = divmod(place, course.tasks)
    return _shuffle(course.seed, course.stage, lap, course.tasks)[offset]


def _looks(course: Course, place: int) -> bool:
    """Whether the draw at a place is one of the share that explores: evenly spread, by arithmetic alone."""
    share = course.spec.explore
    return math.floor((place + 1) * share) > math.floor(place * share)


def _by_variance(course: Course, step: int, tries: Mapping[int, Tries], *, without: set[int], count: int) -> list[int]:
    """Up to `count` unsettled tasks, by their expected variance."""
    luck = random.Random(f"{course.seed}/{course.stage}/{step}/variance")
    keys = []
    for position in range(course.tasks):
        u = 1.0 - luck.random()
        known = difficulty(tries.get(position, UNTRIED), prior=course.spec.prior_attempts)
        if position not in without and known.variance > 0 and not settled(known, course.spec):
            keys.append((math.log(u) / known.variance, position))
    return [position for _, position in sorted(keys, reverse=True)[:count]]


@lru_cache(maxsize=16)
def _shuffle(seed: int, stage: int, lap: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}/{stage}/{lap}").shuffle(order)
    return tuple(order)
