"""Always-valid intervals: they may be looked at after every user, and hold at all looks together.

Source: the normal mixture boundary of Robbins (1970); Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform,
nonparametric, nonasymptotic confidence sequences" (Annals of Statistics 2021), proposition 5; asymptotically for means
with estimated variances Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and
asymptotic confidence sequences" (2023), theorem 2.2. Seen as a test it is the mSPRT of Johari, Koomen, Pekelis and
Walsh, "Always valid inference" (Operations Research 2022). Ours is written in the information of the estimate, one
over its variance, instead of a number of observations, so that the same line serves stratified and clustered
differences.
"""

from __future__ import annotations

import math


def z_bound(information: float, *, alpha: float, scale: float) -> float:
    """How many standard errors an estimate of that information may lie from the truth, at any look.

    With a mixture N(0, scale²) over the distance d, the mixed likelihood ratio after information I is
    `(1 + s²I)^(-1/2) · exp(I²d²s² / (2 (1 + s²I)))`; it stays below 1/alpha for ever with probability 1 − alpha
    (Ville). Solved for `d·sqrt(I)`.

    `scale`: the distance that the bound is tightest for, in the estimate's unit; any positive value is valid.
    """
    mixed = scale * scale * information
    return math.sqrt((1 + 1 / mixed) * (2 * math.log(1 / alpha) + math.log1p(mixed)))


def radius(variance: float, *, alpha: float, scale: float) -> float:
    """Half the width of the interval around an estimate with that variance; see `z_bound`."""
    return z_bound(1 / variance, alpha=alpha, scale=scale) * math.sqrt(variance)


def scale_for(distance: float) -> float:
    """The mixture's scale for decisions at `distance` from a null.

    Twice the distance: within a tenth of the least information both where the half-width is the distance and where an
    effect twice as far from the null is to be found (`tests/rl_core/shipping/test_sequential.py`).
    """
    return 2 * distance
