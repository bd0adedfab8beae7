"""Whether a share rose between two sets of clusters: a permutation test, which holds whatever the data look like."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

DRAWS = 9999
Cell = tuple[float, int]  # of one cluster: a sum, and what it was counted over


class Rise(msgspec.Struct, frozen=True, kw_only=True):
    """Two shares, and the chance of so large a rise among clusters that were dealt to the sides at random."""

    before: float
    now: float
    p: float

    @property
    def by(self) -> float:
        """How much it rose; negative where it fell."""
        return self.now - self.before


def rise(
    before: Sequence[Cell], now: Sequence[Cell], *, least: float = 0.0, seed: int = 0, draws: int = DRAWS
) -> Rise | None:
    """Compare the share of `now` with that of `before`, one-sided; None where a side has nothing to count.

    A rise by less than `least` is not tested: its `p` is 1.

    The clusters are what is exchangeable (groups of attempts at one task), not the attempts within them. `p` is at
    least 1/(draws + 1), and depends on data and seed alone.

    Source: the randomisation test with the +1 correction (Phipson and Smyth 2010, arXiv:1603.05766).
    """
    cells = [*before, *now]
    first, second = _share(before), _share(now)
    if first is None or second is None:
        return None
    observed = second - first
    if observed <= 0 or observed < least:
        return Rise(before=first, now=second, p=1.0)
    luck, n = random.Random(seed), len(now)
    total, count = sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)
    as_large = 0
    for _ in range(draws):
        dealt = luck.sample(cells, n)
        some, over = sum(cell[0] for cell in dealt), sum(cell[1] for cell in dealt)
        if over and count > over and some / over - (total - some) / (count - over) >= observed - 1e-12:
            as_large += 1
    return Rise(before=first, now=second, p=(1 + as_large) / (1 + draws))


def _share(cells: Sequence[Cell]) -> float | None:
    count = sum(cell[1] for cell in cells)
    return sum(cell[0] for cell in cells) / count if count else None
