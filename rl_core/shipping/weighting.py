"""Users who answer are not all users: weights that give the silent ones a voice.

Source: inverse probability of response within strata (weighting classes; Little and Rubin, "Statistical Analysis with
Missing Data", chapter 3). It removes the bias of who answers as far as the strata explain it: within one arm and
stratum, answering must not depend on how content a user is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from rl_core.shipping.estimates import UserOutcome


class Responses(msgspec.Struct, frozen=True):
    """How many users of one arm and stratum were served, and how many of them gave any feedback."""

    served: int
    answered: int


def response_weights(
    responses: Mapping[tuple[str, str], Responses], *, cap: float = 10.0
) -> dict[tuple[str, str], float]:
    """The weight of a user who answered, by (arm, stratum): how many users they stand for.

    At most `cap` times what one of their arm does on average. A stratum in which nobody answered has no weight: nobody
    can speak for it. Weights are by arm too, because a candidate can change who answers, and a difference between arms
    would show that change as quality.
    """
    served, answered = Counter[str](), Counter[str]()
    for (arm, _), one in responses.items():
        served[arm] += one.served
        answered[arm] += one.answered
    return {
        (arm, stratum): min(cap * served[arm] / answered[arm], one.served / one.answered)
        for (arm, stratum), one in responses.items()
        if one.answered > 0
    }


def responses_weighed(
    outcomes: Iterable[UserOutcome], segments: Mapping[tuple[int, str, str], str]
) -> list[UserOutcome]:
    """The same outcomes; who gave one stands for those of their step, arm and segment who did not.

    `segments` has everybody who was served, by (step, arm, user). Where all are of one segment nothing changes.
    """
    rows = list(outcomes)
    served = Counter((arm, f"{step}/{segment}") for (step, arm, _), segment in segments.items())
    cells = [(row.arm, f"{row.stratum}/{segments[row.stratum, row.arm, row.user]}") for row in rows]
    answered = Counter(cells)
    weights = response_weights({cell: Responses(served=n, answered=answered[cell]) for cell, n in served.items()})
    return [msgspec.structs.replace(row, weight=weights[cell]) for row, cell in zip(rows, cells, strict=True)]
