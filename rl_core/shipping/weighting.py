"""Users who answer are not all users: weights that give the silent ones a voice.

Source: inverse probability of response within strata (weighting classes; Little and Rubin, "Statistical Analysis with
Missing Data", chapter 3). It removes the bias of who answers as far as the strata explain it: within one arm and
stratum, answering must not depend on how content a user is.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Responses(msgspec.Struct, frozen=True):
    """How many users of one arm and stratum were served, and how many of them gave any feedback."""

    served: int
    answered: int


def response_weights(
    responses: Mapping[tuple[str, str], Responses], *, cap: float = 20.0
) -> dict[tuple[str, str], float]:
    """The weight of a user who answered, by (arm, persona stratum): how many users they stand for, at most `cap`.

    A stratum in which nobody answered has no weight: nobody can speak for it. Weights are by arm too, because a
    candidate can change who answers, and a difference between arms would show that change as quality.
    """
    return {key: min(cap, one.served / one.answered) for key, one in responses.items() if one.answered > 0}
