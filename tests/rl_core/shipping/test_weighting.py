"""Inverse response rates."""

from __future__ import annotations

import pytest

from rl_core.shipping.canary import UserOutcome
from rl_core.shipping.estimates import estimate
from rl_core.shipping.weighting import Responses, response_weights, responses_weighed


def test_a_user_who_answered_stands_for_those_who_did_not():
    weights = response_weights(
        {
            ("promoted", "strict"): Responses(served=100, answered=25),
            ("promoted", "easy"): Responses(served=100, answered=80),
            ("canary", "strict"): Responses(served=40, answered=1),
            ("canary", "easy"): Responses(served=40, answered=0),
        },
    )
    assert weights == {("promoted", "strict"): 4.0, ("promoted", "easy"): 1.25, ("canary", "strict"): 40.0}


def test_a_weight_is_capped_against_the_arms_average_however_few_answer():
    seldom = {
        ("promoted", "strict"): Responses(served=10_000, answered=10),
        ("promoted", "easy"): Responses(served=10_000, answered=190),
    }
    assert response_weights(seldom, cap=4.0) == {("promoted", "strict"): 400.0, ("promoted", "easy"): 10_000 / 190}
    assert response_weights(seldom)["promoted", "strict"] == 1000.0


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


def spoken(user: str, *, arm: str = "canary", step: int = 0) -> UserOutcome:
    return UserOutcome(stratum=step, arm=arm, total=1.0, count=1, user=user)


def test_users_who_spoke_stand_for_those_of_their_step_arm_and_segment():
    segments = {(0, "canary", user): "strict" for user in ("a", "b", "c", "d")}
    segments |= {(0, "canary", "e"): "easy", (1, "canary", "a"): "strict", (0, "promoted", "f"): "strict"}
    rows = [spoken("a"), spoken("b"), spoken("e"), spoken("a", step=1), spoken("f", arm="promoted")]
    assert [row.weight for row in responses_weighed(rows, segments)] == [2.0, 2.0, 1.0, 1.0, 1.0]


def test_without_segments_weights_change_nothing():
    rows = [
        UserOutcome(stratum=0, arm=arm, total=float(number % 3 > 0), count=1, user=f"{arm} {number}")
        for arm in ("promoted", "canary")
        for number in range(20)
    ]
    everybody = {(0, arm, f"{arm} {number}"): "" for arm in ("promoted", "canary") for number in range(50)}
    plain, weighed = estimate(rows), estimate(responses_weighed(rows, everybody))
    assert weighed.contrast.difference == pytest.approx(plain.contrast.difference)
    assert weighed.contrast.variance == pytest.approx(plain.contrast.variance)
