"""Whether two samples are of one distribution: a two-sample test, and how far apart they are."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """`p` is the chance of a distance so large between two samples of one distribution; `effect` is in [0, 1].

    A small p says that they differ, the effect how much: with many samples the first is small for trifles.
    """

    n_first: int
    n_second: int
    mean_first: float
    mean_second: float
    effect: float
    p: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The Kolmogorov-Smirnov test: `effect` is the largest distance of the two distribution functions. None if empty.

    For values that are 0 or 1 the effect is the difference of the rates. With ties, as among counts, p is too large
    rather than too small.

    Source: the two-sided two-sample test with the asymptotic distribution, Press et al., Numerical Recipes, §14.3.
    """
    if not first or not second:
        return None
    a, b = sorted(first), sorted(second)
    n, m = len(a), len(b)
    effect = max(abs(bisect_right(a, x) / n - bisect_right(b, x) / m) for x in {*a, *b})
    root = math.sqrt(n * m / (n + m))
    return Difference(
        n_first=n,
        n_second=m,
        mean_first=math.fsum(a) / n,
        mean_second=math.fsum(b) / m,
        effect=effect,
        p=_tail((root + 0.12 + 0.11 / root) * effect),
    )


def _tail(x: float) -> float:
    """Q(x) of Kolmogorov's distribution; 1 where the series does not converge, which is at small x alone."""
    if x < 0.2:
        return 1.0
    total = sum((-1.0) ** (j - 1) * math.exp(-2 * (j * x) ** 2) for j in range(1, 101))
    return min(1.0, max(0.0, 2 * total))
