"""The difference between two arms: stratified by canary step, every user counted once, clustered on the user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

PROMOTED, CANARY = "promoted", "canary"
LEAST_USERS = 10  # of each arm in a stratum; with fewer, a standard deviation is too uncertain to build on


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


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """A difference, canary minus promoted, and the variance of that estimate.

    `deviation` is the standard deviation of users' means within an arm and stratum.
    """

    difference: float
    variance: float
    mean_promoted: float
    mean_canary: float
    deviation: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """How many users there are, and what they say; nothing yet while no stratum has `LEAST_USERS` in both arms.

    `fewest_latest` is the smaller number of users of both arms in the latest stratum.
    """

    n_promoted: int
    n_canary: int
    fewest_latest: int
    contrast: Contrast | None


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


Rows = dict[tuple[int, str], list[tuple[str, float, float]]]  # (stratum, arm): user, mean of the user's values, weight
Pair = tuple[_Cell, _Cell]  # promoted, canary


def estimate(outcomes: Iterable[UserOutcome], *, span: float = 0.0, latest: int | None = None) -> Estimate:
    """The stratified difference of users' means.

    Within a stratum a user counts once, however much they wrote; strata are weighted by `n₁n₂ / (n₁ + n₂)`, which
    makes the weighted sum a random walk over users (Cochran, 1954). Its variance sums squared contributions of whole
    users over strata (Liang and Zeger, 1986). Two guards for few users and rare values: a cell's spread is taken to be
    no less than the pooled one, and `span`, the width of the metric's range where it is known, enters each cell as one
    further user that far from the mean: fifty answers without a failure do not mean that there are none.

    `latest`: the stratum whose users are counted apart; by default the highest.
    """
    rows = _rows(outcomes)
    last = max((stratum for stratum, _ in rows), default=0) if latest is None else latest
    return Estimate(
        n_promoted=_users(rows, PROMOTED),
        n_canary=_users(rows, CANARY),
        fewest_latest=min(len(rows.get((last, PROMOTED), ())), len(rows.get((last, CANARY), ()))),
        contrast=_contrast(rows, span),
    )


def _rows(outcomes: Iterable[UserOutcome]) -> Rows:
    rows: Rows = defaultdict(list)
    for one in outcomes:
        if one.count > 0 and one.weight > 0:
            rows[one.stratum, one.arm].append((one.user, one.total / one.count, one.weight))
    return rows


def _contrast(rows: Rows, span: float) -> Contrast | None:
    pairs = {stratum: pair for stratum in {stratum for stratum, _ in rows} if (pair := _pair(rows, stratum))}
    if not pairs:
        return None
    total = sum(_share(pair) for pair in pairs.values())
    shares = {stratum: _share(pair) / total for stratum, pair in pairs.items()}
    pooled = _pooled(pairs.values())
    promoted, canary = (sum(shares[s] * pair[arm].mean for s, pair in pairs.items()) for arm in (0, 1))
    return Contrast(
        difference=canary - promoted,
        variance=_clustered(pairs, shares) + _guard(pairs, shares, pooled, span),
        mean_promoted=promoted,
        mean_canary=canary,
        deviation=pooled**0.5,
    )


def _pair(rows: Rows, stratum: int) -> Pair | None:
    promoted, canary = rows.get((stratum, PROMOTED), []), rows.get((stratum, CANARY), [])
    return (_Cell(promoted), _Cell(canary)) if min(len(promoted), len(canary)) >= LEAST_USERS else None


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


def _users(rows: Rows, arm: str) -> int:
    users = [user for (_, of), found in rows.items() if of == arm for user, _, _ in found]
    return len(set(users) - {""}) + users.count("")
