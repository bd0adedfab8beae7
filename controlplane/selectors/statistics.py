"""Bootstrap intervals, with the standard library alone: the web process imports no numpy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its percentile-bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low > 0


def paired_interval(
    differences: Sequence[float], *, seed: int = 0, draws: int = DRAWS, level: float = 0.95
) -> Interval:
    """Mean of paired differences, resampled over pairs. Raises: ValueError for an empty sequence."""
    generator = random.Random(seed)
    values = list(differences)
    means = [fmean(generator.choices(values, k=len(values))) for _ in range(draws)]
    return _interval(fmean(values), means, len(values), level)


def crossed_interval(
    cells: Sequence[Sequence[float]], *, seed: int = 0, draws: int = DRAWS // 2, level: float = 0.95
) -> Interval:
    """Mean of a table, resampled over rows and columns at once; `n` is the smaller count of both.

    For values that share a cause along both: questions and people, say. Owen, "The pigeonhole bootstrap" (2007): it is
    somewhat too wide, never too narrow. Raises: ValueError for a table without cells.
    """
    if not cells or not cells[0]:
        raise ValueError("a table needs cells")
    generator = random.Random(seed)
    columns = range(len(cells[0]))
    means = []
    for _ in range(draws):
        chosen = generator.choices(columns, k=len(columns))
        means.append(fmean(row[column] for row in generator.choices(cells, k=len(cells)) for column in chosen))
    return _interval(fmean(map(fmean, cells)), means, min(len(cells), len(columns)), level)


def difference_interval(
    first: Sequence[float], last: Sequence[float], *, seed: int = 0, draws: int = DRAWS, level: float = 0.95
) -> Interval:
    """Mean of `last` minus mean of `first`, each resampled by itself; `n` is the smaller count.

    Raises: ValueError for an empty sequence.
    """
    generator = random.Random(seed)
    before, after = list(first), list(last)
    means = [
        fmean(generator.choices(after, k=len(after))) - fmean(generator.choices(before, k=len(before)))
        for _ in range(draws)
    ]
    return _interval(fmean(after) - fmean(before), means, min(len(before), len(after)), level)


def _interval(mean: float, means: list[float], n: int, level: float) -> Interval:
    means.sort()
    tail = (1 - level) / 2
    low = means[int(tail * (len(means) - 1))]
    high = means[int((1 - tail) * (len(means) - 1) + 0.999999)]
    return Interval(mean, low, high, n)
