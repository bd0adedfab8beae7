"""A window by real rows: what is taken, what each answer is worth, and the one reason why anything is left out."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.models import Feedback, Generation, Lane, PolicyVersion, SignalMap
from controlplane.services.clock import database_now
from controlplane.services.feedback import feedback_receive
from controlplane.services.signals import signal_map_publish
from controlplane.services.windows import lane_stage, window_collect
from controlplane.states import Arm, Consent, FeedbackState, GenerationOutcome
from rl_core.specs import BaselineSpec, LossSpec, PreferenceSpec, RealtimeStage, StratumKey, WindowArm, WindowSpec
from rl_core.store import open_store
from rl_core.types import Objective, SamplingParams
from rl_core.windows.selection import LeftOut
from tests.lane_rows import ACTOR, candidate_version, lane_world, thumbs

pytestmark = pytest.mark.django_db
GREEDY = SamplingParams(temperature=0.0)
THUMBS = {"thumbs": {"values": {"true": 1.0, "false": 0.0}}}


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def make_map(world, **content):
    signal_map_publish(project=world.project, content={"signals": THUMBS, **content}, author=None, actor=ACTOR)


def make_stage(world, **changes):
    return RealtimeStage(lane=world.lane.slug, **changes)


def say(world, generation, *, value=True, **changes):
    body = thumbs(generation.id, value=value, **changes)
    return feedback_receive(project=world.project, sender="app", source=None, data=body, actor=ACTOR)


def actor(name):
    return {"hash": name, "kind": "user"}


def answer(world, store, user, *, value=True, prompt="", row=None, **changes):
    """A generation and its user's thumb. `row` changes the generation's columns afterwards."""
    generation = world.generate(store, user_key=user, content=f"Question {prompt or user}", **changes)
    if value is not None:
        say(world, generation, value=value, actor=actor(user))
    columns = {"prompt_hash": prompt or f"prompt-{generation.id}"[:64], **(row or {})}
    Generation.objects.filter(id=generation.id).update(**columns)
    return generation


def taken(window):
    return [item.generation.id for item in window.items]


def test_rewards_become_advantages_against_everybody_and_the_silent_are_dropped(store):
    world = lane_world()
    liked = [answer(world, store, f"u{n}") for n in range(3)]
    disliked = answer(world, store, "u3", value=False)
    answer(world, store, "u4", value=None)
    window = window_collect(lane=world.lane)
    assert taken(window) == [row.id for row in [*liked, disliked]]  # oldest first
    assert [item.advantage for item in window.items] == pytest.approx([0.25, 0.25, 0.25, -0.75])
    assert {item.weight for item in window.items} == {1.0}
    assert (window.answers, window.eligible, window.answered, window.silent) == (4, 5, 4, 1)
    assert window.response_rate == pytest.approx(0.8)
    assert window.on_policy_share == 1.0
    assert window.effective_answers == pytest.approx(4.0)


def test_only_the_promoted_version_is_taken_and_the_others_are_counted(store):
    world = lane_world()
    mine = answer(world, store, "u1")
    answer(world, store, "u2", version=candidate_version(world))
    window = window_collect(lane=world.lane)
    assert taken(window) == [mine.id]
    assert (window.generations, window.elsewhere, window.on_policy_share) == (1, 1, 0.5)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"erased_at": timezone.now()}, LeftOut.ERASED),
        ({"arm": Arm.CANARY}, LeftOut.ARM),
        ({"outcome": GenerationOutcome.CANCELLED}, LeftOut.UNFINISHED),
        ({"outcome": GenerationOutcome.FAILED}, LeftOut.UNFINISHED),
        ({"consent": Consent.EVAL}, LeftOut.CONSENT),
        ({"content_key": ""}, LeftOut.UNRECORDED),
        ({"sampled_tokens": 0}, LeftOut.UNRECORDED),
    ],
)
def test_what_may_not_be_trained_on_is_left_out_by_reason(store, row, reason):
    world = lane_world()
    kept = answer(world, store, "u1")
    answer(world, store, "u2", row=row)
    window = window_collect(lane=world.lane)
    assert taken(window) == [kept.id]
    assert window.left_out == {reason: 1}


def test_both_arms_of_the_same_version_can_be_asked_for(store):
    world = lane_world()
    answer(world, store, "u1", row={"arm": Arm.CANARY})
    stage = make_stage(world, window=WindowSpec(arms=(WindowArm.PROMOTED, WindowArm.CANARY)))
    assert len(window_collect(lane=world.lane, stage=stage).items) == 1


def test_nothing_of_a_quarantined_version_is_taken(store):
    world = lane_world()
    answer(world, store, "u1")
    PolicyVersion.objects.filter(pk=world.lane.promoted_version_id).update(quarantined_at=timezone.now())
    lane = Lane.objects.select_related("promoted_version", "project").get(pk=world.lane.pk)
    assert window_collect(lane=lane).left_out == {LeftOut.VERSION: 1}


@pytest.mark.parametrize("state", [FeedbackState.QUARANTINED, FeedbackState.RETRACTED, FeedbackState.LATE])
def test_feedback_that_was_set_aside_is_not_heard(store, state):
    world = lane_world()
    answer(world, store, "u1")
    Feedback.objects.update(state=state)
    assert window_collect(lane=world.lane).left_out == {LeftOut.SILENT: 1}


def test_the_narrowest_consent_wins(store):
    world = lane_world()
    generation = world.generate(store)
    say(world, generation, consent="eval")
    assert window_collect(lane=world.lane).left_out == {LeftOut.CONSENT: 1}
    say(world, generation, value=False, consent="train", actor=actor("u9"))
    assert [item.reward for item in window_collect(lane=world.lane).items] == [0.0]


def test_a_generation_waits_until_its_horizon_has_closed(store):
    world = lane_world()
    make_map(world, horizon_s=3600.0)
    young, old = answer(world, store, "u1"), answer(world, store, "u2")
    Generation.objects.filter(id=old.id).update(created_at=old.created_at - timedelta(hours=2))
    Feedback.objects.filter(generation_id=old.id).update(occurred_at=old.created_at - timedelta(minutes=90))
    window = window_collect(lane=world.lane)
    assert taken(window) == [old.id]
    assert window.left_out == {LeftOut.OPEN: 1}
    later = window_collect(lane=world.lane, until=database_now() + timedelta(hours=1, minutes=1))
    assert taken(later) == [old.id, young.id]


def test_a_window_can_be_read_as_it_was(store):
    world = lane_world()
    first = answer(world, store, "u1")
    then = database_now()
    late = answer(world, store, "u2")
    say(world, first, value=False, actor=actor("u3"))
    window = window_collect(lane=world.lane, until=then)
    assert [(item.generation.id, item.reward) for item in window.items] == [(first.id, 1.0)]
    assert taken(window_collect(lane=world.lane)) == [first.id, late.id]


def test_silence_can_have_a_value(store):
    world = lane_world()
    make_map(world, silence="value", silence_value=0.25)
    said, quiet = answer(world, store, "u1"), answer(world, store, "u2", value=None)
    window = window_collect(lane=world.lane)
    assert [(item.generation.id, item.reward) for item in window.items] == [(said.id, 1.0), (quiet.id, 0.25)]
    assert (window.answers, window.answered, window.eligible) == (1, 1, 2)
    assert {item.weight for item in window.items} == {1.0}


def test_programs_and_outliers_are_not_heard(store):
    world = lane_world()
    people = [answer(world, store, f"u{n % 6}", value=n % 5 > 0) for n in range(30)]
    for generation in people[:11]:
        say(world, generation, value=False, actor=actor("bot"))
    alone = answer(world, store, "u7", value=None)
    say(world, alone, actor=actor("bot"))
    spoiled = [answer(world, store, "spoiler", value=False) for _ in range(8)]
    stage = make_stage(world, window=WindowSpec(events_an_hour=11, user_cap=0))
    window = window_collect(lane=world.lane, stage=stage)
    assert taken(window) == [row.id for row in people]
    assert {item.reward for item in window.items} == {0.0, 1.0}  # the bot's word among others' is not heard either
    assert window.left_out == {LeftOut.PROGRAM: 1, LeftOut.OUTLIER: len(spoiled)}
    off = make_stage(world, window=WindowSpec(events_an_hour=0, outlier_deviations=0, user_cap=0))
    assert window_collect(lane=world.lane, stage=off).left_out == {}


def test_caps_hold_for_users_and_for_repeats(store):
    world = lane_world()
    many = [answer(world, store, "u1") for _ in range(4)]
    asked = [answer(world, store, "u2", prompt="same") for _ in range(3)]
    stage = make_stage(world, window=WindowSpec(user_cap=3, repeat_cap=2))
    window = window_collect(lane=world.lane, stage=stage)
    assert taken(window) == [row.id for row in [*many[1:], *asked[1:]]]  # the newest are taken
    assert window.left_out == {LeftOut.USER_CAP: 1, LeftOut.REPEAT: 1}


def test_without_a_user_key_the_actor_stands_for_the_user(store):
    world = lane_world()
    for _ in range(3):
        generation = world.generate(store, user_key="")
        say(world, generation, actor=actor("same-person"))
    stage = make_stage(world, window=WindowSpec(user_cap=2, repeat_cap=0))
    assert window_collect(lane=world.lane, stage=stage).left_out == {LeftOut.USER_CAP: 1}


def test_greedy_answers_go_to_kto_and_demonstrations_to_dpo(store):
    world = lane_world()
    whole = answer(world, store, "u1")
    greedy = answer(world, store, "u2", value=False, sampling=GREEDY)
    shown = world.generate(store, user_key="u3")
    earlier = (timezone.now() - timedelta(minutes=1)).isoformat()
    say(world, shown, value=False, demonstration="Draft.", occurred_at=earlier)
    newest = say(world, shown, value=False, demonstration="Better.", actor=actor("u3"))
    window = window_collect(lane=world.lane)
    found = [(item.generation.id, item.objective, item.advantage, item.feedback_id) for item in window.items]
    assert found == [
        (whole.id, Objective.POLICY_GRADIENT, 0.0, None),
        (greedy.id, Objective.KTO, -1.0, None),
        (shown.id, Objective.DPO, 1.0, uuid.UUID(str(newest.feedback_id))),
    ]
    assert window.untrainable == 1
    off = make_stage(world, preference=PreferenceSpec(kto_weight=0, dpo_weight=0))
    plain = window_collect(lane=world.lane, stage=off)
    assert taken(plain) == [whole.id, shown.id]
    assert plain.left_out == {LeftOut.UNTRAINABLE: 1}


def test_those_who_seldom_answer_count_more_unless_the_map_says_no(store):
    world = lane_world()
    for number in range(12):
        answer(world, store, "often", value=number < 10)
        answer(world, store, "seldom", value=True if number < 3 else None)
    weights = {item.generation.user_hash: item.weight for item in window_collect(lane=world.lane).items}
    assert len(weights) == 2
    assert max(weights.values()) > 2 * min(weights.values())
    make_map(world, weigh_responses=False)
    assert {item.weight for item in window_collect(lane=world.lane).items} == {1.0}


def test_what_time_left_of_an_answer_is_what_it_counts(store):
    world = lane_world()
    signals = {"thumbs": {**THUMBS["thumbs"], "half_life_s": 60.0}}
    signal_map_publish(project=world.project, content={"signals": signals}, author=None, actor=ACTOR)
    fresh, stale = answer(world, store, "u1"), answer(world, store, "u2")
    Generation.objects.filter(id=stale.id).update(created_at=stale.created_at - timedelta(seconds=60))
    weights = {item.generation.id: item.weight for item in window_collect(lane=world.lane).items}
    assert weights[fresh.id] / weights[stale.id] == pytest.approx(2.0, rel=0.1)


def answers_by(world, store, key, *, column="prompt_hash"):
    """Twelve answers in each of two strata, that are liked 11 and 1 times."""
    for stratum, likes in (("easy", 11), ("hard", 1)):
        for number in range(12):
            answer(world, store, f"{stratum}-{number}", value=number < likes, row={column: stratum})
    return window_collect(lane=world.lane, stage=make_stage(world, baseline=BaselineSpec(stratum=key)))


@pytest.mark.parametrize(("key", "column"), [(StratumKey.PROMPT, "prompt_hash"), (StratumKey.SESSION, "session")])
def test_an_answer_is_compared_within_its_stratum(store, key, column):
    """Against everybody a like would be worth 0.5; among eleven of twelve liked it is worth a tenth of that."""
    world = lane_world()
    window = answers_by(world, store, key, column=column)
    worth = {(getattr(i.generation, column), i.reward): i.advantage for i in window.items}
    assert worth["easy", 1.0] == pytest.approx(0.09, abs=0.03)
    assert worth["hard", 1.0] == pytest.approx(1.0, abs=0.03)
    assert worth["easy", 0.0] == pytest.approx(-1.0, abs=0.03)
    assert window.strata == 2
    everybody = make_stage(world, loss=LossSpec(kind="ppo_clip", advantage="responders"))
    flat = window_collect(lane=world.lane, stage=everybody)
    assert {abs(item.advantage) for item in flat.items} == {0.5}


def test_strata_by_a_tag_of_the_feedback(store):
    world = lane_world()
    for task, likes in (("mail", 11), ("code", 1)):
        for number in range(12):
            generation = answer(world, store, f"{task}-{number}", value=None)
            say(world, generation, value=number < likes, tags={"task": task})
    baseline = BaselineSpec(stratum=StratumKey.TAG, tag="task")
    window = window_collect(lane=world.lane, stage=make_stage(world, baseline=baseline))
    assert window.strata == 2
    assert min(item.advantage for item in window.items) == pytest.approx(-1.0, abs=0.03)


def test_an_episodes_outcome_is_heard_of_each_of_its_turns(store):
    """A session of three turns, whose outcome comes at its end: half as loud with every turn between."""
    world = lane_world()
    make_map(world, episode_discount=0.5, weigh_responses=False)
    turns = [world.generate(store, user_key="u1", session="s1") for _ in range(3)]
    Generation.objects.filter(session="s1").update(prompt_hash="")
    body = thumbs(turns[-1].id, value=False, target={"kind": "episode", "id": "s1"}, actor=actor("u1"))
    feedback_receive(project=world.project, sender="app", source=None, data=body, actor=ACTOR)
    window = window_collect(lane=world.lane, stage=make_stage(world, window=WindowSpec(events_an_hour=1)))
    assert [(item.generation.id, item.reward) for item in window.items] == [(row.id, 0.0) for row in turns]
    weights = [item.weight for item in window.items]
    assert weights[0] / weights[2] == pytest.approx(0.25)


def test_a_window_reads_no_more_than_its_limit(store):
    world = lane_world()
    rows = [answer(world, store, f"u{n}") for n in range(5)]
    window = window_collect(lane=world.lane, stage=make_stage(world, window=WindowSpec(limit=3)))
    assert taken(window) == [row.id for row in rows[2:]]
    assert window.generations == 3


def test_the_report_is_plain_data(store):
    world = lane_world()
    answer(world, store, "u1")
    answer(world, store, "u2", value=None)
    report = json.loads(json.dumps(window_collect(lane=world.lane).report()))
    assert report["objectives"] == {"policy_gradient": 1}
    assert report["left_out"] == {"silent": 1}
    row = SignalMap.objects.get(project=world.project)
    assert report["signal_map"] == {"number": 1, "hash": row.content_hash}
    assert (report["items"], report["eligible"], report["response_rate"]) == (1, 2, 0.5)
    empty = window_collect(lane=lane_world().lane).report()
    assert (empty["response_rate"], empty["on_policy_share"]) == (None, None)


def test_the_lanes_stage_is_that_of_its_cadence():
    world = lane_world()
    assert lane_stage(world.lane) == RealtimeStage(lane="assistant")
    world.lane.cadence = {"stage": {"minimum_answers": 7, "window": {"user_cap": 5}}}
    assert lane_stage(world.lane) == RealtimeStage(lane="assistant", minimum_answers=7, window=WindowSpec(user_cap=5))
    world.lane.cadence = {"stage": {"minimum_answers": "seven"}}
    assert lane_stage(world.lane) == RealtimeStage(lane="assistant")
