"""The difference between two arms: stratified by canary step, every user counted once, clustered on the user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

PROMOTED, CANARY = "promoted", "canary"


class UserOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one user gave one metric in one stratum: the sum of `count` values, and the user's weight.

    `arm` is `promoted` or `canary`. `user` ties the rows of a user over strata together; without it each row counts as
    a user of its own, which is too sure of itself when users return.
    """

    stratum: int
    arm: str
    total: float
    count: int
    weight: float = 1.0
    user: str = ""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A difference, canary minus promoted, with the variance of the estimate and what it rests on.

    `deviation` is the standard deviation of users' means within a cell; `fewest_latest` the smaller number of users of
    both arms in the latest stratum.
    """

    difference: float
    variance: float
    mean_promoted: float
    mean_canary: float
    n_promoted: int
    n_canary: int
    deviation: float
    fewest_latest: int


class _Cell:
    """One arm in one stratum."""

    __slots__ = ("mean", "rows", "squares", "weight", "weight_squares")

    def __init__(self, rows: Sequence[tuple[str, float, float]]) -> None:
        self.rows = rows  # user, mean of the user's values, weight
        self.weight = sum(weight for _, _, weight in rows)
        self.weight_squares = sum(weight * weight for _, _, weight in rows)
        self.mean = sum(weight * value for _, value, weight in rows) / self.weight
        self.squares = sum((weight * (value - self.mean)) ** 2 for _, value, weight in rows)

    @property
    def size(self) -> float:
        """Users, discounted for unequal weights (Kish)."""
        return self.weight * self.weight / self.weight_squares

    @property
    def spread(self) -> float:
        """Variance of users' means."""
        return self.squares / self.weight_squares * self.correction

    @property
    def correction(self) -> float:
        """Bessel's."""
        return len(self.rows) / (len(self.rows) - 1)


Pair = tuple[_Cell, _Cell]  # promoted, canary


def estimate(outcomes: Iterable[UserOutcome], *, span: float = 0.0, latest: int | None = None) -> Estimate | None:
    """The stratified difference of users' means, or None while no stratum has two users in both arms.

    Within a stratum a user counts once, however much they wrote; strata are weighted by `n₁n₂ / (n₁ + n₂)`, which
    makes the weighted sum a random walk over users (Cochran, 1954). Its variance sums squared contributions of whole
    users over strata (Liang and Zeger, 1986). Two guards for few users and rare values: a cell's spread is taken to be
    no less than the pooled one, and `span`, the width of the metric's range where it is known, enters each cell as one
    further user that far from the mean: fifty answers without a failure do not mean that there are none.

    `latest`: the stratum whose users are counted apart; by default the highest.
    """
    cells = _cells(outcomes)
    strata = {stratum for stratum, _ in cells}
    pairs = {stratum: pair for stratum in strata if (pair := _pair(cells, stratum)) is not None}
    if not pairs:
        return None
    total = sum(_share(pair) for pair in pairs.values())
    shares = {stratum: _share(pair) / total for stratum, pair in pairs.items()}
    pooled = _pooled(pairs.values())
    means = [sum(shares[s] * pair[arm].mean for s, pair in pairs.items()) for arm in (0, 1)]
    last = max(strata) if latest is None else latest
    return Estimate(
        difference=means[1] - means[0],
        variance=_clustered(pairs, shares) + _guard(pairs, shares, pooled, span),
        mean_promoted=means[0],
        mean_canary=means[1],
        n_promoted=_users(cells, PROMOTED),
        n_canary=_users(cells, CANARY),
        deviation=pooled**0.5,
        fewest_latest=min(len(cells.get((last, PROMOTED), ())), len(cells.get((last, CANARY), ()))),
    )


def _cells(outcomes: Iterable[UserOutcome]) -> dict[tuple[int, str], list[tuple[str, float, float]]]:
    cells: dict[tuple[int, str], list[tuple[str, float, float]]] = defaultdict(list)
    for row in outcomes:
        if row.count > 0 and row.weight > 0:
            cells[row.stratum, row.arm].append((row.user, row.total / row.count, row.weight))
    return cells


def _pair(cells: dict[tuple[int, str], list[tuple[str, float, float]]], stratum: int) -> Pair | None:
    promoted, canary = cells.get((stratum, PROMOTED), []), cells.get((stratum, CANARY), [])
    return (_Cell(promoted), _Cell(canary)) if min(len(promoted), len(canary)) >= 2 else None


def _share(pair: Pair) -> float:
    promoted, canary = pair[0].size, pair[1].size
    return promoted * canary / (promoted + canary)


def _pooled(pairs: Iterable[Pair]) -> float:
    cells = [cell for pair in pairs for cell in pair]
    freedom = sum(len(cell.rows) - 1 for cell in cells)
    return sum(cell.spread * (len(cell.rows) - 1) for cell in cells) / freedom


def _clustered(pairs: dict[int, Pair], shares: dict[int, float]) -> float:
    """Sum of squared contributions of users; a user in several strata contributes their sum."""
    alone = 0.0
    users: dict[str, float] = defaultdict(float)
    for stratum, pair in pairs.items():
        for sign, cell in zip((-1, 1), pair, strict=True):
            factor = sign * shares[stratum] / cell.weight * cell.correction**0.5
            for user, value, weight in cell.rows:
                part = factor * weight * (value - cell.mean)
                if user:
                    users[user] += part
                else:
                    alone += part * part
    return alone + sum(part * part for part in users.values())


def _guard(pairs: dict[int, Pair], shares: dict[int, float], pooled: float, span: float) -> float:
    """What is added for cells that have seen less spread than there is."""
    return sum(
        shares[stratum] ** 2 * (max(0.0, pooled - cell.spread) / cell.size + (span / len(cell.rows)) ** 2)
        for stratum, pair in pairs.items()
        for cell in pair
    )


def _users(cells: dict[tuple[int, str], list[tuple[str, float, float]]], arm: str) -> int:
    rows = [user for (_, of), rows in cells.items() if of == arm for user, _, _ in rows]
    return len(set(rows) - {""}) + rows.count("")
