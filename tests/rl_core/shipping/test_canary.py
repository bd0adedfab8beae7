"""What a look says: pass, fail or undecided, and why."""

from __future__ import annotations

import json

import msgspec
import pytest
from outcomes import arms, canary, guardrail, metric

from rl_core.shipping.canary import CanaryLook, Move, Verdict, effect, judge, step_follow
from rl_core.shipping.specs import CanarySpec, Direction, MetricRole, MetricSource

EVEN = [(0, 0.5, 5000, 5000)]


def test_a_goal_that_is_no_worse_passes():
    look = judge(canary(), {"thumbs": arms(users=5000, promoted=0.5, canary=0.5)}, EVEN)
    assert look.verdict is Verdict.PASS
    assert look.reasons == []
    seen = look.effects["thumbs"]
    assert seen.low is not None
    assert -0.05 < seen.low < 0 == seen.difference


def test_a_goal_that_is_worse_by_more_than_its_margin_fails():
    look = judge(canary(), {"thumbs": arms(users=2000, promoted=0.5, canary=0.35)}, EVEN)
    assert look.verdict is Verdict.FAIL
    assert look.reasons[0].startswith("thumbs: worse by more than 0.05 (-0.15 [")


def test_worse_within_the_margin_is_no_failure():
    look = judge(canary(), {"thumbs": arms(users=20_000, promoted=0.5, canary=0.47)}, [(0, 0.5, 20_000, 20_000)])
    assert look.effects["thumbs"].high < 0
    assert look.verdict is Verdict.PASS


def test_few_users_are_undecided_whatever_they_say():
    look = judge(canary(), {"thumbs": arms(users=29, promoted=0.5, canary=0.6)}, [(0, 0.5, 29, 29)])
    assert look.verdict is Verdict.UNDECIDED
    assert look.reasons == ["thumbs: 29 of 30 users in the smaller arm in this step"]


def test_enough_users_with_too_wide_an_interval_are_undecided():
    look = judge(canary(), {"thumbs": arms(users=100, promoted=0.5, canary=0.5)}, [(0, 0.5, 100, 100)])
    assert look.verdict is Verdict.UNDECIDED
    assert "not yet shown to be worse by less than 0.05" in look.reasons[0]


def test_no_data_is_no_pass():
    look = judge(CanarySpec(), {}, [])
    assert look.verdict is Verdict.UNDECIDED
    assert len(look.reasons) == 4
    assert look.sample_ratio_p == 1.0


def test_a_step_does_not_pass_on_the_users_of_earlier_steps():
    seen = {"thumbs": arms(users=5000, promoted=0.5, canary=0.5)}
    assert judge(canary(), seen, EVEN).verdict is Verdict.PASS
    look = judge(canary(), seen, [*EVEN, (1, 0.5, 5, 5)])
    assert look.reasons == ["thumbs: 0 of 30 users in the smaller arm in this step"]
    seen["thumbs"] += arms(users=30, promoted=0.5, canary=0.5, stratum=1)
    assert judge(canary(), seen, [*EVEN, (1, 0.5, 30, 30)]).verdict is Verdict.PASS


def test_a_guardrail_stops_a_canary_whose_goal_passes():
    seen = {
        "thumbs": arms(users=5000, promoted=0.5, canary=0.5),
        "failures": arms(users=5000, promoted=0.01, canary=0.06),
    }
    look = judge(canary(metric(), guardrail()), seen, EVEN)
    assert look.verdict is Verdict.FAIL
    assert [reason.split(":")[0] for reason in look.reasons] == ["failures"]
    seen["failures"] = arms(users=5000, promoted=0.06, canary=0.01)
    assert judge(canary(metric(), guardrail()), seen, EVEN).verdict is Verdict.PASS


def test_a_guardrail_that_measures_nothing_keeps_the_canary_from_passing():
    seen = {"thumbs": arms(users=5000, promoted=0.5, canary=0.5)}
    look = judge(canary(metric(), guardrail()), seen, EVEN)
    assert look.verdict is Verdict.UNDECIDED
    assert look.reasons == ["failures: 0 of 30 users in the smaller arm so far"]


def test_a_guardrail_without_a_single_failure_is_no_harm():
    seen = {
        "thumbs": arms(users=5000, promoted=0.5, canary=0.5),
        "failures": arms(users=5000, promoted=0.0, canary=0.0),
    }
    look = judge(canary(metric(), guardrail()), seen, EVEN)
    assert look.verdict is Verdict.PASS
    assert look.effects["failures"].low < 0 < look.effects["failures"].high


def test_a_metric_without_any_spread_has_no_interval():
    seen = effect(arms(users=50, promoted=1.0, canary=1.0), alpha=0.05)
    assert (seen.difference, seen.low, seen.high) == (0.0, None, None)
    look = judge(canary(), {"thumbs": arms(users=5000, promoted=1.0, canary=1.0)}, EVEN)
    assert look.verdict is Verdict.UNDECIDED
    assert "no interval yet" in look.reasons[0]


def test_a_gain_can_be_required():
    strict = canary(metric(), require_gain=True)
    same = judge(strict, {"thumbs": arms(users=5000, promoted=0.5, canary=0.5)}, EVEN)
    assert same.verdict is Verdict.UNDECIDED
    assert "shown to be better" in same.reasons[0]
    assert judge(strict, {"thumbs": arms(users=5000, promoted=0.5, canary=0.6)}, EVEN).verdict is Verdict.PASS


def test_lower_can_be_better_for_a_goal_too():
    latency = metric("wait", source=MetricSource.LATENCY, key="", direction=Direction.LOWER, margin=0.05)
    faster = judge(canary(latency), {"wait": arms(users=2000, promoted=0.5, canary=0.3)}, EVEN)
    slower = judge(canary(latency), {"wait": arms(users=2000, promoted=0.3, canary=0.5)}, EVEN)
    assert (faster.verdict, slower.verdict) == (Verdict.PASS, Verdict.FAIL)


def test_arms_that_do_not_fit_their_shares_fail_before_any_metric():
    seen = {"thumbs": arms(users=5000, promoted=0.5, canary=0.5)}
    look = judge(canary(), seen, [(0, 0.5, 5000, 4500)])
    assert look.verdict is Verdict.FAIL
    assert look.reasons[0].startswith("the arms' sizes do not fit their shares")
    assert look.sample_ratio_p < 0.001


def test_the_alpha_of_a_metric_widens_its_interval():
    rows = {"thumbs": arms(users=1000, promoted=0.5, canary=0.4), "clicks": arms(users=1000, promoted=0.5, canary=0.4)}
    spec = canary(metric(alpha_share=0.9), metric("clicks", key="clicks"))
    look = judge(spec, rows, EVEN)
    assert look.effects["thumbs"].alpha == pytest.approx(0.045)
    assert look.effects["clicks"].alpha == pytest.approx(0.005)
    assert look.effects["clicks"].low < look.effects["thumbs"].low


def test_a_margin_of_zero_is_judged_too():
    sharp = canary(metric(margin=0.0))
    assert judge(sharp, {"thumbs": arms(users=5000, promoted=0.5, canary=0.4)}, EVEN).verdict is Verdict.FAIL
    assert judge(sharp, {"thumbs": arms(users=5000, promoted=0.5, canary=0.6)}, EVEN).verdict is Verdict.PASS


def test_a_look_is_plain_data():
    look = judge(canary(metric(), guardrail()), {"thumbs": arms(users=50, promoted=0.5, canary=0.5)}, EVEN)
    data = json.loads(json.dumps(msgspec.to_builtins(look)))
    assert data["verdict"] == "undecided"
    assert data["effects"]["failures"]["low"] is None


def test_roles_and_verdicts_are_the_words_of_the_control_plane():
    from controlplane.states import Arm, CanaryVerdict
    from rl_core.shipping.estimates import CANARY, PROMOTED

    assert {verdict.value for verdict in Verdict} == set(CanaryVerdict.values)
    assert {PROMOTED, CANARY} == set(Arm.values)
    assert set(MetricRole) == {"goal", "guardrail"}


TWO_STEPS = canary(steps=(0.1, 0.5))


def look_of(verdict: Verdict, *, enough: bool = True) -> CanaryLook:
    return CanaryLook(verdict=verdict, enough_users=enough, reasons=[], effects={}, sample_ratio_p=1.0)


@pytest.mark.parametrize(
    ("position", "seen", "before", "enough", "held", "verdict", "move"),
    [
        # Harm ends it at any step, held or not, also after a pass.
        (0, Verdict.FAIL, "", True, False, Verdict.FAIL, Move.BACK),
        (1, Verdict.FAIL, "pass", True, True, Verdict.FAIL, Move.BACK),
        # A step before the last goes on without a pass, but not before its time, and not without its users.
        (0, Verdict.UNDECIDED, "", True, True, Verdict.UNDECIDED, Move.NEXT),
        (0, Verdict.UNDECIDED, "", True, False, Verdict.UNDECIDED, Move.STAY),
        (0, Verdict.UNDECIDED, "undecided", False, True, Verdict.UNDECIDED, Move.STAY),
        (0, Verdict.PASS, "", True, False, Verdict.PASS, Move.STAY),
        # The last step has to pass; a pass that was shown stays one.
        (1, Verdict.UNDECIDED, "", True, True, Verdict.UNDECIDED, Move.STAY),
        (1, Verdict.PASS, "", True, False, Verdict.PASS, Move.STAY),
        (1, Verdict.PASS, "", True, True, Verdict.PASS, Move.DONE),
        (1, Verdict.UNDECIDED, "pass", True, True, Verdict.PASS, Move.DONE),
    ],
)
def test_what_follows_from_a_look(position, seen, before, enough, held, verdict, move):
    follows = step_follow(TWO_STEPS, look_of(seen, enough=enough), position=position, before=before, held=held)
    assert (follows.verdict, follows.move) == (verdict, move)


def test_enough_users_is_about_users_alone():
    wide = judge(canary(), {"thumbs": arms(users=100, promoted=0.5, canary=0.5)}, [(0, 0.5, 100, 100)])
    assert (wide.verdict, wide.enough_users) == (Verdict.UNDECIDED, True)
    few = judge(canary(), {"thumbs": arms(users=29, promoted=0.5, canary=0.5)}, [(0, 0.5, 29, 29)])
    assert (few.verdict, few.enough_users) == (Verdict.UNDECIDED, False)
    unmeasured = judge(canary(metric(), guardrail()), {"thumbs": arms(users=5000, promoted=0.5, canary=0.5)}, EVEN)
    assert not unmeasured.enough_users
