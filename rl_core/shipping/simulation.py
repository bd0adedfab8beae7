"""Simulated canaries, to see that what the statistics promise holds. Needs numpy; nothing that serves imports it.

Axes: U users, S steps, N users in the order of their arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.shipping.canary import CanaryLook, Move, Verdict, conclude, effect_of, step_follow
from rl_core.shipping.estimates import LEAST_USERS, Contrast, Estimate
from rl_core.shipping.sample_ratio import sample_ratio_over
from rl_core.shipping.sequential import scale_for
from rl_core.shipping.specs import CanarySpec, Direction, MetricRole, MetricSource, MetricSpec

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Who comes, and what the candidate does to them.

    `users` are known, `visit` of them come in each step, at random times, with 1 + Poisson(`more_requests`) requests;
    `answer` of the requests get a thumb, up with probability `satisfaction` + `quality` in the canary, with a
    correlation of `icc` between two thumbs of one user.
    """

    users: int = 40_000
    visit: float = 0.5
    more_requests: float = 1.0
    answer: float = 0.56
    satisfaction: float = 0.45
    icc: float = 0.04
    failure: float = 0.01
    refusal: float = 0.05
    quality: float = 0.0
    looks: int = 25


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a simulated canary ended: with which verdict of which step. `done`: the candidate was promoted."""

    verdict: Verdict
    step: int
    done: bool = False


CANARY = CanarySpec(
    metrics=(
        MetricSpec(
            name="thumbs",
            source=MetricSource.SIGNAL,
            key="thumbs",
            role=MetricRole.GOAL,
            direction=Direction.HIGHER,
            margin=0.05,
            alpha_share=0.4,
        ),
        MetricSpec(
            name="failures",
            source=MetricSource.FAILURE,
            role=MetricRole.GUARDRAIL,
            direction=Direction.LOWER,
            margin=0.02,
        ),
        MetricSpec(
            name="refusals",
            source=MetricSource.REFUSAL,
            role=MetricRole.GUARDRAIL,
            direction=Direction.LOWER,
            margin=0.05,
        ),
        MetricSpec(
            name="responses",
            source=MetricSource.RESPONSE_RATE,
            role=MetricRole.GUARDRAIL,
            direction=Direction.HIGHER,
            margin=0.05,
        ),
    )
)


def release(traffic: Traffic, spec: CanarySpec, seed: int) -> Ended:
    """Take one candidate through the steps, each held for as long as its users come (`canary.step_follow`).

    A release that a step's users do not move on ends there, undecided.
    """
    rng = np.random.default_rng(seed)
    crowd = _Crowd(traffic, spec, rng)
    step, verdict = 0, Verdict.UNDECIDED
    while True:
        followed, before = Move.STAY, ""
        for number, look in enumerate(crowd.looks(step), start=1):
            seen = step_follow(spec, look, position=step, before=before, held=number == traffic.looks)
            followed, before, verdict = seen.move, seen.verdict, seen.verdict
            if followed is Move.BACK:
                break
        if followed is not Move.NEXT:
            return Ended(verdict=verdict, step=step, done=followed is Move.DONE)
        step += 1


def releases(traffic: Traffic, spec: CanarySpec, *, runs: int, seed: int) -> Counter[str]:
    """How `runs` simulated canaries ended: `promoted`, or the verdict with the share of the step it came at."""
    ends: Counter[str] = Counter()
    for run in range(runs):
        ended = release(traffic, spec, seed * 1_000_003 + run)
        ends["promoted" if ended.done else f"{ended.verdict.value} at {spec.steps[ended.step]:.0%}"] += 1
    return ends


class Ledger:
    """One metric of all users, and its sufficient statistic: the Gram matrix of (present, mean) in every cell.

    It is brought up to date for the users that came, which makes many looks cheap. `estimate` gives the numbers of
    `rl_core.shipping.estimates.estimate` for users of equal weight.
    """

    def __init__(self, canary_US: Bools, *, span: float = 0.0) -> None:
        users, self.steps = canary_US.shape
        self.canary_US, self.span = canary_US, span
        self.totals_US: Floats = np.zeros((users, self.steps))
        self.counts_US: Floats = np.zeros((users, self.steps))
        # Columns: present in (promoted, canary) by step, then the user's mean there, 0 elsewhere.
        self.cells_UC: Floats = np.zeros((users, 4 * self.steps))
        self.gram: Floats = np.zeros((4 * self.steps, 4 * self.steps))
        self.seen_AU: Bools = np.zeros((2, users), dtype=bool)

    def add(self, users: Integers, step: int, values: Floats | Bools) -> None:
        """Add one value for each of the users, who may come more than once."""
        touched, places = np.unique(users, return_inverse=True)
        before = self.cells_UC[touched]
        self.totals_US[touched, step] += np.bincount(places, weights=values, minlength=touched.size)
        self.counts_US[touched, step] += np.bincount(places, minlength=touched.size)
        arms = self.canary_US[touched, step].astype(np.int64)
        present, mean = arms * self.steps + step, (2 + arms) * self.steps + step
        self.cells_UC[touched, present] = 1.0
        self.cells_UC[touched, mean] = self.totals_US[touched, step] / self.counts_US[touched, step]
        after = self.cells_UC[touched]
        self.gram += after.T @ after - before.T @ before
        self.seen_AU[arms, touched] = True

    def sizes(self, step: int) -> tuple[int, int]:
        """Users of the promoted arm and of the canary in the step."""
        return round(self.gram[step, step]), round(self.gram[self.steps + step, self.steps + step])

    def estimate(self, step: int) -> Estimate:
        """What has come so far, with `step` as the latest."""
        return Estimate(
            n_promoted=int(self.seen_AU[0].sum()),
            n_canary=int(self.seen_AU[1].sum()),
            fewest_latest=min(self.sizes(step)),
            contrast=self._contrast(),
        )

    def _contrast(self) -> Contrast | None:
        cells = 2 * self.steps
        n_AS = np.diag(self.gram)[:cells].reshape(2, self.steps)
        used = np.flatnonzero(n_AS.min(0) > LEAST_USERS - 0.5)
        if used.size == 0:
            return None
        n_AS = n_AS[:, used]
        mean_AS = np.diag(self.gram[:cells, cells:]).reshape(2, self.steps)[:, used] / n_AS
        squares_AS = np.diag(self.gram)[cells:].reshape(2, self.steps)[:, used] - n_AS * mean_AS**2
        spread_AS = np.maximum(0, squares_AS) / (n_AS - 1)
        pooled = float((spread_AS * (n_AS - 1)).sum() / (n_AS - 1).sum())
        share_S = n_AS[0] * n_AS[1] / n_AS.sum(0)
        share_S /= share_S.sum()
        factor_AS = np.array([[-1.0], [1.0]]) * share_S / n_AS * np.sqrt(n_AS / (n_AS - 1))
        parts = np.zeros((2, 2, self.steps))
        parts[0][:, used], parts[1][:, used] = -factor_AS * mean_AS, factor_AS
        clustered = max(0.0, float(parts.ravel() @ self.gram @ parts.ravel()))
        guard = float((share_S**2 * (np.maximum(0, pooled - spread_AS) / n_AS + (self.span / n_AS) ** 2)).sum())
        promoted, canary = (float(mean) for mean in mean_AS @ share_S)
        return Contrast(
            difference=canary - promoted,
            variance=clustered + guard,
            mean_promoted=promoted,
            mean_canary=canary,
            deviation=pooled**0.5,
        )


class _Crowd:
    """The users of one simulated release, and what they have done so far."""

    def __init__(self, traffic: Traffic, spec: CanarySpec, rng: np.random.Generator) -> None:
        self.traffic, self.spec, self.rng = traffic, spec, rng
        deviation = (traffic.icc * traffic.satisfaction * (1 - traffic.satisfaction)) ** 0.5
        self.taste_U: Floats = rng.normal(0.0, deviation, traffic.users)
        self.canary_US: Bools = rng.random(traffic.users)[:, None] < np.array(spec.steps)[None, :]
        self.ledgers = {metric.name: Ledger(self.canary_US, span=metric.source.span) for metric in spec.metrics}

    def looks(self, step: int) -> Iterator[CanaryLook]:
        """Serve the step's requests in random order, with evenly spaced looks."""
        came = np.flatnonzero(self.rng.random(self.traffic.users) < self.traffic.visit)
        requests = np.repeat(came, 1 + self.rng.poisson(self.traffic.more_requests, came.size))
        self.rng.shuffle(requests)
        for part in np.array_split(requests, self.traffic.looks):
            self._serve(part, step)
            yield self._look(step)

    def _serve(self, users: Integers, step: int) -> None:
        traffic, rng, size = self.traffic, self.rng, users.size
        in_canary = self.canary_US[users, step]
        chance = np.clip(traffic.satisfaction + self.taste_U[users] + traffic.quality * in_canary, 0, 1)
        answered = rng.random(size) < traffic.answer
        self.ledgers["thumbs"].add(users[answered], step, (rng.random(size) < chance)[answered])
        self.ledgers["failures"].add(users, step, rng.random(size) < traffic.failure)
        self.ledgers["refusals"].add(users, step, rng.random(size) < traffic.refusal)
        self.ledgers["responses"].add(users, step, answered)

    def _look(self, step: int) -> CanaryLook:
        effects = {
            metric.name: effect_of(
                self.ledgers[metric.name].estimate(step),
                alpha=self.spec.alpha_of(metric.name),
                scale=scale_for(metric.margin) or None,
            )
            for metric in self.spec.metrics
        }
        exposures = [(s, self.spec.steps[s], *self.ledgers["failures"].sizes(s)) for s in range(step + 1)]
        return conclude(self.spec, effects, sample_ratio_over(exposures, planned=len(self.spec.steps)))
