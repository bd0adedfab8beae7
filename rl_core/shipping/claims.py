"""What the statistics of a canary promise, each promise tried in simulation. `python -m rl_core.shipping simulate`.

The tests of this package run the same functions: a few runs in the quick ones, all of them in the full ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from rl_core.shipping.peeking import Crossing, Returning, Values, false_alarms, ratio_alarms, returning_alarms
from rl_core.shipping.personas import persona_bias
from rl_core.shipping.simulation import CANARY, Traffic, releases

ALPHA = 0.05
RATIO_LEVEL = 0.001


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One promise: what was wanted, what was seen, and whether it held."""

    name: str
    wanted: str
    seen: str
    held: bool


def peeking_claims(*, runs: int = 2000, users: int = 4000) -> Iterator[Claim]:
    """A look at every user: false alarms at most alpha, within two standard errors of the simulation."""
    for values in Values:
        for share in (0.5, 0.05):
            seen = false_alarms(values, share=share, users=users, runs=runs, alpha=ALPHA, scale=0.2, seed=1)
            yield _at_most(f"every user looked at, {values.value}, {share:.0%} in the canary", seen, ALPHA)


def returning_claims(*, runs: int = 2000) -> Iterator[Claim]:
    """The same with users who return over the steps, answer again, and change arms."""
    for crowd in (Returning(), Returning(icc=0.5), Returning(users=300, steps=(0.5,), more=30.0, visit=1.0)):
        seen = returning_alarms(crowd, runs=runs, alpha=ALPHA, scale=0.2, seed=2)
        steps = "/".join(f"{share * 100:g}" for share in crowd.steps)
        name = f"{crowd.users} users return, steps {steps} %, {crowd.more + 1:g} replies, correlation {crowd.icc:g}"
        yield _at_most(name, seen, ALPHA)


def release_claims(*, runs: int = 200, users: int = 100_000) -> Iterator[Claim]:
    """Whole canaries through 1, 5, 25 and 50 %, four metrics; three quarters of `users` come in each step."""
    harmed, same, better, limit = (
        releases(Traffic(quality=quality, users=users, visit=0.75), CANARY, runs=runs, seed=seed)
        for seed, quality in enumerate((-0.15, 0.0, 0.10, -0.05))
    )
    crowd = f"{round(0.75 * users):,} users a step"
    last = f"at {CANARY.steps[-1]:.0%}"
    reached = sum(count for end, count in harmed.items() if end == "promoted" or end.endswith(last))
    stopped = runs - reached
    failed_harmed, failed_same, failed_limit = (
        sum(count for end, count in ends.items() if end.startswith("fail")) for ends in (harmed, same, limit)
    )
    yield Claim(
        name=f"{crowd}, 15 points worse: stopped before the 50 % step",
        wanted=f"{_share(runs, 195)} of {runs} or more",
        seen=f"{stopped} ({failed_harmed} shown to be worse, {stopped - failed_harmed} held back undecided)",
        held=stopped >= _share(runs, 195),
    )
    yield Claim(
        name=f"{crowd}, no change: failed by any metric",
        wanted=f"{_share(runs, 10)} of {runs} or fewer",
        seen=f"{failed_same} ({same['promoted']} promoted, {runs - failed_same - same['promoted']} undecided)",
        held=failed_same <= _share(runs, 10),
    )
    yield Claim(
        name=f"{crowd}, 10 points better: promoted through all steps",
        wanted=f"{_share(runs, 160)} of {runs} or more",
        seen=f"{better['promoted']}",
        held=better["promoted"] >= _share(runs, 160),
    )
    yield Claim(
        name=f"{crowd}, worse by exactly the margin of 5 points: failed, or promoted",
        wanted=f"{_share(runs, 10)} of {runs} or fewer, each",
        seen=f"{failed_limit}, {limit['promoted']}",
        held=max(failed_limit, limit["promoted"]) <= _share(runs, 10),
    )


def ratio_claims(*, runs: int = 10_000, found_runs: int = 10_000) -> Iterator[Claim]:
    """The sample ratio: 51:49 found within 100,000 users; no alarm without a cause."""
    found = ratio_alarms(0.51, share=0.5, users=100_000, every=500, runs=found_runs, level=RATIO_LEVEL, seed=3)
    yield Claim(
        name="a split of 51:49 found within 100,000 users, looked at every 500",
        wanted="0.99 or more",
        seen=f"{found.rate:.4f} of {found.runs:,} runs",
        held=found.rate >= 0.99,
    )
    for share in (0.5, 0.01):
        seen = ratio_alarms(share, share=share, users=20_000, every=100, runs=runs, level=RATIO_LEVEL, seed=4)
        yield _at_most(f"arms as intended, {share:.0%} in the canary, looked at every 100 of 20,000", seen, RATIO_LEVEL)


def persona_claims(*, runs: int = 400, users: int = 2000) -> Iterator[Claim]:
    """A candidate silences strict users: the plain difference calls that a gain, the weighted one does not."""
    plain = persona_bias(weighted=False, users=users, runs=runs, seed=5)
    weighted = persona_bias(weighted=True, users=users, runs=runs, seed=5)
    yield Claim(
        name="strict users fall silent, no true difference: unweighted estimate",
        wanted="more than 10 standard errors from 0",
        seen=f"{plain.mean:+.4f} ± {plain.error:.4f}, {plain.alarms} of {runs} intervals leave 0 out",
        held=abs(plain.mean) > 10 * plain.error,
    )
    yield Claim(
        name="the same, users weighted by inverse response rate",
        wanted="within 2.6 standard errors of 0",
        seen=f"{weighted.mean:+.4f} ± {weighted.error:.4f}, {weighted.alarms} of {runs} intervals leave 0 out",
        held=abs(weighted.mean) < 2.6 * weighted.error and weighted.alarms <= ALPHA * runs,
    )


CLAIMS: tuple[Callable[[], Iterator[Claim]], ...] = (
    peeking_claims,
    returning_claims,
    release_claims,
    ratio_claims,
    persona_claims,
)


def claim_line(claim: Claim) -> str:
    """One row of the table that documents and the command show."""
    return f"| {claim.name} | {claim.wanted} | {claim.seen} | {'yes' if claim.held else 'NO'} |"


def _at_most(name: str, seen: Crossing, level: float) -> Claim:
    error = (level * (1 - level) / seen.runs) ** 0.5
    return Claim(
        name=name,
        wanted=f"{level:g} or less, within {2 * error:.2g}",
        seen=f"{seen.rate:.4f} of {seen.runs:,} runs",
        held=seen.rate <= level + 2 * error,
    )


def _share(runs: int, of_200: int) -> int:
    """So many of 200, for another number of runs."""
    return round(runs * of_200 / 200)
