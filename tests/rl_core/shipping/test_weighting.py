"""Inverse response rates."""

from __future__ import annotations

import pytest

from rl_core.shipping.canary import UserOutcome
from rl_core.shipping.estimates import estimate
from rl_core.shipping.weighting import Responses, response_weights


def test_a_user_who_answered_stands_for_those_who_did_not():
    weights = response_weights(
        {
            ("promoted", "strict"): Responses(served=100, answered=25),
            ("promoted", "easy"): Responses(served=100, answered=80),
            ("canary", "strict"): Responses(served=40, answered=1),
            ("canary", "easy"): Responses(served=40, answered=0),
        },
        cap=20.0,
    )
    assert weights == {("promoted", "strict"): 4.0, ("promoted", "easy"): 1.25, ("canary", "strict"): 20.0}


def test_weights_undo_by_hand_what_silence_does():
    # Half of 100 users are strict and never content, half easy and always: 0.5 in truth, in both arms.
    # In the canary only 10 of the strict answer.
    answered = {("promoted", "strict"): 50, ("promoted", "easy"): 50, ("canary", "strict"): 10, ("canary", "easy"): 50}
    weights = response_weights({key: Responses(served=50, answered=count) for key, count in answered.items()})

    def difference(*, weighted: bool) -> float:
        rows = [
            UserOutcome(
                stratum=0,
                arm=arm,
                total=float(persona == "easy"),
                count=1,
                weight=weights[arm, persona] if weighted else 1.0,
            )
            for (arm, persona), count in answered.items()
            for _ in range(count)
        ]
        found = estimate(rows).contrast
        assert found is not None
        return found.difference

    assert difference(weighted=False) == pytest.approx(50 / 60 - 0.5)
    assert difference(weighted=True) == pytest.approx(0.0, abs=1e-12)
