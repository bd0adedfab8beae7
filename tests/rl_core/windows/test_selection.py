from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.specs import AdvantageKind, BaselineSpec, LossSpec, PreferenceSpec, RealtimeStage, WindowSpec
from rl_core.types import Objective
from rl_core.windows.selection import Candidate, LeftOut, select

OFF = WindowSpec(user_cap=0, repeat_cap=0)


def make_candidate(number=0, **changes):
    values = {
        "user": f"u{number}",
        "prompt": f"p{number}",
        "stratum": f"p{number}",
        "weigh_by": f"u{number}",
        "reward": 1.0,
        "answered": True,
        "whole": True,
        **changes,
    }
    return Candidate(**values)


def make_stage(**changes):
    return RealtimeStage(lane="l", **changes)


def taken(selection):
    return [item.index for item in selection.chosen]


def test_no_user_steers_the_window():
    candidates = [make_candidate(0, prompt=f"p{n}") for n in range(5)] + [make_candidate(1)]
    selection = select(candidates, make_stage(window=WindowSpec(user_cap=3)), weigh=False)
    assert taken(selection) == [0, 1, 2, 5]  # newest first: the oldest two are over the cap
    assert selection.left_out == {3: LeftOut.USER_CAP, 4: LeftOut.USER_CAP}


def test_repeats_of_a_prompt_by_one_user_are_bounded():
    asked = [make_candidate(0, prompt="same") for _ in range(3)]
    selection = select(
        [*asked, make_candidate(1, prompt="same")], make_stage(window=WindowSpec(repeat_cap=2)), weigh=False
    )
    assert taken(selection) == [0, 1, 3]
    assert selection.left_out == {2: LeftOut.REPEAT}


def test_silence_uses_up_no_cap():
    quiet = [make_candidate(0, reward=None, answered=False) for _ in range(4)]
    selection = select([*quiet, make_candidate(0)], make_stage(window=WindowSpec(user_cap=1)), weigh=False)
    assert taken(selection) == [4]
    assert Counter(selection.left_out.values()) == {LeftOut.SILENT: 4}


def test_unknown_users_are_under_no_cap():
    candidates = [make_candidate(n, user="", prompt="same") for n in range(5)]
    assert len(select(candidates, make_stage(window=WindowSpec(user_cap=1, repeat_cap=1)), weigh=False).chosen) == 5


def test_objectives_by_what_is_known_of_an_answer():
    candidates = [
        make_candidate(0),
        make_candidate(1, whole=False),
        make_candidate(2, whole=False, reward=0.0),
        make_candidate(3, demonstrated=True),
        make_candidate(4, demonstrated=True, whole=False, reward=None, answered=False),
    ]
    selection = select(candidates, make_stage(), weigh=False)
    assert [item.objective for item in selection.chosen] == [
        Objective.POLICY_GRADIENT, Objective.KTO, Objective.KTO, Objective.DPO, Objective.DPO,
    ]  # fmt: skip
    assert [item.advantage for item in selection.chosen] == [0.0, 1.0, -1.0, 1.0, 1.0]
    assert selection.objectives() == {Objective.POLICY_GRADIENT: 1, Objective.KTO: 2, Objective.DPO: 2}
    off = select(candidates, make_stage(preference=PreferenceSpec(kto_weight=0, dpo_weight=0)), weigh=False)
    assert taken(off) == [0, 3]
    assert off.left_out == {1: LeftOut.UNTRAINABLE, 2: LeftOut.UNTRAINABLE, 4: LeftOut.SILENT}


def test_greedy_samples_never_reach_the_policy_gradient_nor_its_baseline():
    candidates = [make_candidate(0), make_candidate(1, reward=0.0), make_candidate(2, reward=0.0, whole=False)]
    selection = select(candidates, make_stage(), weigh=False)
    assert [item.advantage for item in selection.chosen][:2] == [0.5, -0.5]


def test_the_known_recipe_can_be_said_exactly():
    """Reward minus the mean of those who answered, all alike."""
    stage = make_stage(
        loss=LossSpec(kind="ppo_clip", advantage=AdvantageKind.RESPONDERS, ratio_low=0.7, ratio_high=1.5),
        window=OFF,
        baseline=BaselineSpec(stratum="none", user_offset=False),
    )
    rewards = [1.0, 0.0, None, 1.0, 1.0]
    candidates = [make_candidate(0, reward=r, answered=r is not None) for r in rewards]
    selection = select(candidates, stage, weigh=False)
    assert [item.advantage for item in selection.chosen] == pytest.approx([0.25, -0.75, 0.25, 0.25])
    assert {item.weight for item in selection.chosen} == {1.0}
    assert (stage.optimizer_steps, stage.optimizer.learning_rate) == (2, 1e-4)


def test_weights_follow_the_response_rates_and_have_mean_one():
    often = [make_candidate(0, weigh_by="often", reward=1.0) for _ in range(20)]
    seldom = [make_candidate(1, weigh_by="seldom", reward=1.0) for _ in range(5)]
    quiet = [make_candidate(1, weigh_by="seldom", reward=None, answered=False) for _ in range(20)]
    selection = select([*often, *seldom, *quiet], make_stage(window=OFF), weigh=True)
    weights = {item.index: item.weight for item in selection.chosen}
    assert weights[20] / weights[0] > 3
    assert sum(weights.values()) == pytest.approx(25)
    assert selection.effective_answers() < 20
    assert {item.weight for item in select([*often, *seldom, *quiet], make_stage(window=OFF), weigh=False).chosen} == {
        1.0
    }


candidates_of = st.lists(
    st.builds(
        Candidate,
        user=st.sampled_from(["", "a", "b", "c"]),
        prompt=st.sampled_from(["", "p", "q"]),
        stratum=st.sampled_from(["", "p", "q"]),
        weigh_by=st.sampled_from(["a", "b"]),
        reward=st.none() | st.floats(-1, 1),
        answered=st.booleans(),
        whole=st.booleans(),
        demonstrated=st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(candidates_of, st.integers(0, 4), st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_every_candidate_is_taken_or_left_out_for_a_reason(candidates, user_cap, repeat_cap, weigh, preference):
    stage = make_stage(
        window=WindowSpec(user_cap=user_cap, repeat_cap=repeat_cap),
        preference=PreferenceSpec(kto_weight=preference, dpo_weight=preference),
    )
    selection = select(candidates, stage, weigh=weigh)
    assert sorted([*taken(selection), *selection.left_out]) == list(range(len(candidates)))
    users = Counter(candidates[index].user for index in taken(selection))
    assert all(count <= user_cap for user, count in users.items() if user and user_cap)
    for item in selection.chosen:
        candidate = candidates[item.index]
        assert item.weight > 0
        if item.objective is Objective.POLICY_GRADIENT:
            assert candidate.whole
            assert candidate.reward is not None
