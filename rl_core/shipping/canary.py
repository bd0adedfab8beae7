"""What a look at a canary says: pass, fail, or undecided. Pure Python; 100,000 users take well below a second.

One family-wise error rate for a release: `alpha` is split over the metrics (Bonferroni), and each metric's interval
holds at all looks and steps together (`rl_core.shipping.sequential`). So a look may be taken at any time, as often as
wanted, and acted upon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from rl_core.shipping.estimates import Estimate, UserOutcome, estimate
from rl_core.shipping.sample_ratio import sample_ratio, sample_ratio_over
from rl_core.shipping.sequential import radius, scale_for
from rl_core.shipping.specs import CanarySpec, Direction, MetricRole, MetricSpec
from rl_core.shipping.weighting import Responses, response_weights

__all__ = [
    "CanaryLook",
    "Effect",
    "Exposure",
    "Move",
    "Responses",
    "StepLook",
    "UserOutcome",
    "Verdict",
    "conclude",
    "effect",
    "effect_of",
    "judge",
    "response_weights",
    "sample_ratio",
    "step_follow",
]

SMALL = 0.2  # standard deviations: what an interval without a margin is tightest for

Exposure = tuple[int, float, int, int]  # stratum, intended share of the canary, promoted users, canary users


class Verdict(StrEnum):
    """What a look shows."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    UNDECIDED = "undecided"


class Move(StrEnum):
    """What follows from a look at a step."""

    BACK = "back"  # harm was shown: users go back to the promoted version
    STAY = "stay"
    NEXT = "next"  # more users meet the candidate
    DONE = "done"  # the last step has passed: the candidate may be promoted


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Canary minus promoted, in the metric's own unit, with its always-valid interval; None where nothing is known.

    `n_promoted` and `n_canary` are users; `fewest_latest` the smaller number of both arms in the latest step.
    """

    difference: float | None = None
    low: float | None = None
    high: float | None = None
    n_promoted: int = 0
    n_canary: int = 0
    mean_promoted: float | None = None
    mean_canary: float | None = None
    alpha: float
    fewest_latest: int = 0


class CanaryLook(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `reasons` are sentences: of a fail what was shown, of an undecided look what is missing.

    `enough_users`: every metric has the users that it needs, whatever they say.
    """

    verdict: Verdict
    enough_users: bool
    reasons: list[str]
    effects: dict[str, Effect]
    sample_ratio_p: float


class StepLook(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's verdict is after a look, and what follows from it."""

    verdict: Verdict
    move: Move


def effect(
    outcomes: Iterable[UserOutcome],
    *,
    alpha: float,
    scale: float | None = None,
    span: float = 0.0,
    latest: int | None = None,
) -> Effect:
    """The stratified difference with an interval that holds at every look with probability 1 − alpha.

    `scale`: the distance that the interval is tightest for (`rl_core.shipping.sequential`); by default a fifth of the
    standard deviation of users' means. `span`, `latest`: see `rl_core.shipping.estimates.estimate`.
    """
    return effect_of(estimate(outcomes, span=span, latest=latest), alpha=alpha, scale=scale)


def effect_of(found: Estimate, *, alpha: float, scale: float | None = None) -> Effect:
    """The effect that an estimate shows. Without any spread in the data there is no interval yet."""
    counted = Effect(
        alpha=alpha, n_promoted=found.n_promoted, n_canary=found.n_canary, fewest_latest=found.fewest_latest
    )
    contrast = found.contrast
    if contrast is None:
        return counted
    half = None
    if contrast.variance > 0:
        scale = scale or SMALL * contrast.deviation or contrast.variance**0.5
        half = radius(contrast.variance, alpha=alpha, scale=scale)
    return msgspec.structs.replace(
        counted,
        difference=contrast.difference,
        low=None if half is None else contrast.difference - half,
        high=None if half is None else contrast.difference + half,
        mean_promoted=contrast.mean_promoted,
        mean_canary=contrast.mean_canary,
    )


def judge(spec: CanarySpec, metrics: Mapping[str, Iterable[UserOutcome]], exposures: Sequence[Exposure]) -> CanaryLook:
    """Judge all that was seen of a release's canary so far, with its latest step.

    Fail: a metric is shown to be worse by more than its margin, or the arms' sizes do not fit their shares. Pass: every
    goal is shown to be no worse than its margin (better, with `require_gain`), and there are enough users: of each goal
    in the latest step, of each guardrail in all steps together. Otherwise undecided: no data is not a pass.
    """
    latest = max((stratum for stratum, *_ in exposures), default=None)
    effects = {
        metric.name: effect(
            metrics.get(metric.name, ()),
            alpha=spec.alpha_of(metric.name),
            scale=scale_for(metric.margin) or None,
            span=metric.source.span,
            latest=latest,
        )
        for metric in spec.metrics
    }
    return conclude(spec, effects, sample_ratio_over(exposures, planned=len(spec.steps)))


def conclude(spec: CanarySpec, effects: dict[str, Effect], sample_ratio_p: float) -> CanaryLook:
    """The verdict that effects and sample ratio lead to; see `judge`."""
    harms = [_worse(metric, effects[metric.name]) for metric in spec.metrics if _harmed(metric, effects[metric.name])]
    if sample_ratio_p <= spec.sample_ratio_alpha:
        harms.insert(0, f"the arms' sizes do not fit their shares (p {sample_ratio_p:.2g}): no metric can be believed")
    few = [lack for metric in spec.metrics if (lack := _few(spec, metric, effects[metric.name]))]
    unshown = [lack for metric in spec.metrics if (lack := _unshown(spec, metric, effects[metric.name]))]
    verdict = Verdict.FAIL if harms else Verdict.UNDECIDED if few or unshown else Verdict.PASS
    return CanaryLook(
        verdict=verdict,
        enough_users=not few,
        reasons=harms or [*few, *unshown],
        effects=effects,
        sample_ratio_p=sample_ratio_p,
    )


def step_follow(spec: CanarySpec, look: CanaryLook, *, position: int, before: str, held: bool) -> StepLook:
    """The one rule of a canary's steps: simulations and the control plane follow it, look for look.

    Harm at any look ends the canary. A step that has been `held` for its time and has enough users goes on to the next
    unless harm was shown; only the last step has to pass. Small shares are there to meet harm early and with few users,
    and are too small to show that there is none (`rl_core.shipping.power`): a pass at each would starve all but the
    largest lanes and make no promotion safer, for the last step judges the users of all of them.

    `before` is the step's verdict so far, empty at its first look. A pass is a pass at the moment that it was shown,
    as intervals hold at all looks together: only harm takes it back.
    """
    passed = before == Verdict.PASS and look.verdict is not Verdict.FAIL
    verdict = Verdict.PASS if passed else look.verdict
    last = position == len(spec.steps) - 1
    if verdict is Verdict.FAIL:
        move = Move.BACK
    elif not held or not (verdict is Verdict.PASS if last else look.enough_users):
        move = Move.STAY
    else:
        move = Move.DONE if last else Move.NEXT
    return StepLook(verdict=verdict, move=move)


def _better(metric: MetricSpec, seen: Effect) -> tuple[float, float] | None:
    """The interval in the metric's good direction."""
    if seen.low is None or seen.high is None:
        return None
    return (seen.low, seen.high) if metric.direction is Direction.HIGHER else (-seen.high, -seen.low)


def _harmed(metric: MetricSpec, seen: Effect) -> bool:
    bounds = _better(metric, seen)
    return bounds is not None and bounds[1] < -metric.margin


def _few(spec: CanarySpec, metric: MetricSpec, seen: Effect) -> str:
    """Which users the metric lacks, or nothing: a goal needs them in the step, a guardrail in all steps together."""
    goal = metric.role is MetricRole.GOAL
    users = seen.fewest_latest if goal else min(seen.n_promoted, seen.n_canary)
    where = "in this step" if goal else "so far"
    if users >= spec.minimum_users:
        return ""
    return f"{metric.name}: {users} of {spec.minimum_users} users in the smaller arm {where}"


def _unshown(spec: CanarySpec, metric: MetricSpec, seen: Effect) -> str:
    """What a goal that has its users does not show yet, or nothing."""
    if metric.role is not MetricRole.GOAL or _few(spec, metric, seen):
        return ""
    bounds = _better(metric, seen)
    least = 0.0 if spec.require_gain else -metric.margin
    if bounds is not None and bounds[0] > least:
        return ""
    wanted = "better" if spec.require_gain else f"worse by less than {metric.margin:g}"
    return f"{metric.name}: not yet shown to be {wanted} ({_interval(seen)})"


def _worse(metric: MetricSpec, seen: Effect) -> str:
    return f"{metric.name}: worse by more than {metric.margin:g} ({_interval(seen)})"


def _interval(seen: Effect) -> str:
    if seen.difference is None or seen.low is None or seen.high is None:
        return "no interval yet"
    return f"{seen.difference:+.3g} [{seen.low:+.3g}, {seen.high:+.3g}], {seen.n_promoted} and {seen.n_canary} users"
