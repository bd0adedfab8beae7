"""How well readers of follow-ups agree with labels: precision and recall with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl_core.errors import JudgeFailed, SignalError

Z_95 = 1.959963984540054


class LabelledFollowUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a labelled set. `split`: `development` was seen while a reader was written, `held_out` was not."""

    text: str
    previous: str
    dissatisfied: bool
    split: str


Reader = Callable[[LabelledFollowUp], bool]


@dataclass(frozen=True, slots=True)
class Share:
    """A proportion with its 95 % Wilson interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """A reader against the labels. `failed` answers of a judge are counted apart and are no verdicts."""

    n: int
    positives: int
    failed: int
    precision: Share | None
    recall: Share | None


def labelled_read(path: Path) -> list[LabelledFollowUp]:
    """The lines of a labelled set. Raises: SignalError, naming the line."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            rows.append(msgspec.json.decode(line, type=LabelledFollowUp))
        except msgspec.DecodeError as error:
            raise SignalError(f"{path}, line {number}: {error}") from error
    return rows


def agreement(rows: Iterable[LabelledFollowUp], read: Reader) -> Agreement:
    """Read each line and compare with its label."""
    hits = alarms = positives = failed = n = 0
    for row in rows:
        n += 1
        try:
            said = read(row)
        except JudgeFailed:
            failed += 1
            continue
        positives += row.dissatisfied
        alarms += said
        hits += said and row.dissatisfied
    return Agreement(n, positives, failed, share_of(hits, alarms), share_of(hits, positives))


def share_of(hits: int, n: int) -> Share | None:
    """`hits` of `n` with its Wilson interval; None of nothing. Source: Wilson (1927)."""
    if n == 0:
        return None
    p, z2 = hits / n, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Share(p, max(0.0, centre - half), min(1.0, centre + half))
