"""How many users a canary needs before it can decide. What `python -m rl_core.shipping power` prints.

A lower bound: it counts only what the last look sees, and looks before it decide some canaries sooner.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec

from rl_core.errors import SpecError
from rl_core.shipping.sequential import scale_for, z_bound

NORMAL = NormalDist()


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of a canary: margin, the alpha it may spend, and how its values vary.

    `deviation` is that of single values; `replies` the values that a user gives, with a correlation of `icc` between
    two of them. The mean over n users with m values each varies like one over `n·m / (1 + icc·(m − 1))` values.
    """

    margin: float = 0.05
    alpha: float = 0.02
    deviation: float = 0.5
    replies: float = 1.0
    icc: float = 0.04

    def __post_init__(self) -> None:
        if not (self.margin > 0 and self.deviation > 0 and self.replies >= 1):
            raise SpecError("margin and deviation must be positive, and replies at least 1")
        if not (0 < self.alpha < 1 and 0 <= self.icc <= 1):
            raise SpecError("alpha must be in (0, 1), and icc in [0, 1]")

    def information(self, canary_users: float, share: float) -> float:
        """One over the variance of the difference, in the metric's unit, with `share` of all users in the canary."""
        variance_user = self.deviation**2 * (1 + self.icc * (self.replies - 1)) / self.replies
        return canary_users * (1 - share) / variance_user


def power(design: Design, effect: float, *, canary_users: float, share: float = 0.5) -> float:
    """The chance that a candidate of that true effect is decided: stopped beyond the margin, passed within it.

    `effect` counts in the metric's good direction; exactly at the margin nothing is ever decided.
    """
    information = design.information(canary_users, share)
    gap = abs(effect + design.margin)
    bound = z_bound(information, alpha=design.alpha, scale=scale_for(design.margin))
    return NORMAL.cdf(gap * math.sqrt(information) - bound)


def users_needed(design: Design, effect: float, *, wanted: float = 0.9, share: float = 0.5) -> int:
    """The least users of the canary's arm that decide with the wanted chance. Raises: SpecError at the margin."""
    if abs(effect + design.margin) < 1e-9:
        raise SpecError(f"an effect of {effect} lies on the margin: no number of users decides")
    high = 1
    while power(design, effect, canary_users=high, share=share) < wanted:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if power(design, effect, canary_users=middle, share=share) < wanted:
            low = middle
        else:
            high = middle
    return high


MARGINS = (-4, -3, -2, 0, 1, 2)  # true differences shown, in margins
USERS = (50, 100, 200, 500, 1000, 2000, 5000, 10_000)
SHARES = (0.01, 0.05, 0.25, 0.50)


def power_lines(design: Design, *, wanted: float = 0.9) -> list[str]:
    """Two tables: the chance of a decision by users of the canary, and the users that a wanted chance takes."""
    what = (
        f"margin {design.margin:g}, alpha {design.alpha:g}, standard deviation {design.deviation:g}, "
        f"{design.replies:g} replies a user (correlation {design.icc:g})"
    )
    effects = [times * design.margin for times in MARGINS]
    header = f"{'true difference':26}" + "".join(f"{_signed(effect):>10}" for effect in effects)
    verdicts = f"{'right verdict':26}" + "".join(f"{_verdict(design, effect):>10}" for effect in effects)
    lines = [what, "", "Chance of the right verdict by then, arms of equal size", header, verdicts]
    for users in USERS:
        chances = [power(design, effect, canary_users=users) for effect in effects]
        lines.append(f"{f'{users:,} users an arm':26}" + "".join(f"{chance:>10.2f}" for chance in chances))
    lines += ["", f"Users, of both arms together, for a chance of {wanted:g}", header, verdicts]
    for share in SHARES:
        needed = [users_needed(design, effect, wanted=wanted, share=share) / share for effect in effects]
        lines.append(f"{f'{share:.0%} in the canary':26}" + "".join(f"{math.ceil(users):>10,}" for users in needed))
    return lines


def _verdict(design: Design, effect: float) -> str:
    return "fail" if effect < -design.margin else "pass"


def _signed(effect: float) -> str:
    return f"{effect:+g}" if effect else "0"
