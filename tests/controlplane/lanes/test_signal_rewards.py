"""From feedback to reward: delay, half-life, horizons, silence, trust, and floods that must not steer."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from controlplane.errors import Invalid
from controlplane.models import Feedback, FeedbackSource, SignalDefinition
from controlplane.services.signals import (
    MAX_TIME_S,
    SignalMapContent,
    reward_and_strength,
    reward_of,
    signal_map_publish,
)
from controlplane.states import SignalType
from tests.lane_rows import ACTOR, lane_world

ANSWERED = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
THUMBS = SignalDefinition(slug="thumbs", value_type=SignalType.BOOLEAN)
KEPT = SignalDefinition(slug="kept", value_type=SignalType.NUMBER, minimum=0.0, maximum=1.0)
UPDOWN = {"values": {"true": 1.0, "false": -1.0}}


def content(**fields):
    return msgspec.convert({"signals": {"thumbs": UPDOWN}, **fields}, type=SignalMapContent)


def event(value, *, signal=THUMBS, sender="key", actor="u1", after_s=0.0, arrived_s=None, trust=None, distance=0):
    arrived = ANSWERED + timedelta(seconds=after_s if arrived_s is None else arrived_s)
    row = Feedback(
        id=uuid.uuid4(),
        created_at=arrived,
        sender=sender,
        signal=signal,
        value=value,
        actor_hash=actor,
        occurred_at=ANSWERED + timedelta(seconds=after_s),
        source=FeedbackSource(slug=sender, trust_weight=trust) if trust is not None else None,
    )
    row.distance = distance
    return row


def worth(content_, *events):
    found = reward_and_strength(content_, events, generation_at=ANSWERED)
    return None if found is None else (round(found.value, 6), round(found.strength, 6))


def test_before_the_delay_an_event_does_not_count():
    rules = content(signals={"thumbs": {**UPDOWN, "delay_s": 60}})
    assert worth(rules, event(True, after_s=59)) is None
    assert worth(rules, event(True, after_s=60)) == (1.0, 1.0)
    assert worth(rules, event(True, after_s=10), event(False, actor="u2", after_s=90)) == (-1.0, 1.0)


def test_after_the_horizon_it_counts_no_longer():
    rules = content(horizon_s=100)
    assert worth(rules, event(True, after_s=100)) == (1.0, 1.0)
    assert worth(rules, event(True, after_s=101)) is None
    rules = content(horizon_s=100, signals={"thumbs": {**UPDOWN, "horizon_s": 500}})
    assert worth(rules, event(True, after_s=400)) == (1.0, 1.0)


def test_a_half_life_halves():
    rules = content(signals={"thumbs": {**UPDOWN, "half_life_s": 100}})
    assert worth(rules, event(True, after_s=100)) == (1.0, 0.5)
    assert worth(rules, event(True, after_s=300)) == (1.0, 0.125)
    # Fresh 1.0 against two half-lives old 0.25, of two senders: (1 − 0.25) / 1.25, and 1.25 of 2 is left.
    assert worth(rules, event(True), event(False, sender="other", after_s=200)) == (0.6, 0.625)


def test_a_senders_clock_is_believed_between_answer_and_arrival():
    rules = content(signals={"thumbs": {**UPDOWN, "half_life_s": 100}})
    assert worth(rules, event(True, after_s=-5000, arrived_s=300)) == (1.0, 1.0)
    assert worth(rules, event(True, after_s=290, arrived_s=100)) == (1.0, 0.5)


def test_silence_is_dropped_or_has_a_value():
    assert worth(content()) is None
    rules = content(silence="value", silence_value=0.25)
    assert worth(rules) == (0.25, 1.0)
    assert worth(rules, event(True)) == (1.0, 1.0)
    other = SignalDefinition(slug="other", value_type=SignalType.BOOLEAN)
    assert worth(rules, event(True, signal=other)) == (0.25, 1.0)


def test_two_sources_that_disagree_are_weighed_by_trust():
    rules = content()
    assert worth(rules, event(True, sender="a", trust=3.0), event(False, sender="b", trust=1.0)) == (0.5, 1.0)
    assert worth(rules, event(True, sender="a", trust=1.0), event(False, sender="b", trust=1.0)) == (0.0, 1.0)
    assert worth(rules, event(True, sender="a"), event(False, sender="b", trust=0.5)) == (round(0.5 / 1.5, 6), 1.0)


def test_weights_of_signals_and_linear_values():
    rules = content(signals={"thumbs": {**UPDOWN, "weight": 3}, "kept": {"low": -1.0, "high": 1.0}})
    assert worth(rules, event(True), event(0.25, signal=KEPT)) == ((3 * 1.0 - 0.5) / 4, 1.0)
    below = SignalDefinition(slug="kept", value_type=SignalType.NUMBER, minimum=-1.0, maximum=0.0)
    rules = content(signals={"kept": {"low": 0.0, "high": 1.0}})
    assert worth(rules, event(-0.25, signal=below)) == (0.75, 1.0)


def test_pressing_again_is_no_louder_and_the_newest_counts():
    presses = [event(False, after_s=number) for number in range(500)]
    assert worth(content(), event(True, actor="u2"), *presses[:1]) == worth(
        content(), event(True, actor="u2"), *presses
    )
    assert worth(content(), event(True), event(False, after_s=9)) == (-1.0, 1.0)


def test_a_flood_of_made_up_actors_is_one_voice_of_its_sender():
    honest = [event(True, sender="shop", actor="u1")]
    flood = [event(False, sender="forger", actor=f"fake-{number}") for number in range(1000)]
    assert worth(content(), *honest, *flood) == (0.0, 1.0)
    weak = [event(False, sender="forger", actor=f"fake-{number}", trust=0.1) for number in range(1000)]
    assert worth(content(), *honest, *weak)[0] == round(0.9 / 1.1, 6)
    # Within one sender, people are heard alike.
    mixed = [event(True, actor="a"), event(True, actor="b"), event(True, actor="c"), event(False, actor="d")]
    assert worth(content(), *mixed) == (0.5, 1.0)


def test_an_outcome_counts_less_with_every_turn_between():
    rules = content(episode_discount=0.5)
    assert worth(rules, event(True, distance=0)) == (1.0, 1.0)
    assert worth(rules, event(True, distance=3)) == (1.0, 0.125)
    # The turn's own thumbs down (1) against its episode's good end two turns later (0.25).
    assert worth(rules, event(False), event(True, sender="outcome", distance=2)) == (-0.6, 0.625)
    assert worth(content(), event(True, distance=9)) == (1.0, 1.0)
    assert worth(content(episode_discount=0.0), event(True, distance=1)) is None


def test_a_retracted_value_and_an_unmapped_category_say_nothing():
    assert worth(content(signals={"kept": {}}), event(None, signal=KEPT)) is None
    category = SignalDefinition(slug="mood", value_type=SignalType.CATEGORY, categories=["good", "odd"])
    rules = content(signals={"mood": {"values": {"good": 1.0}}})
    assert worth(rules, event("odd", signal=category)) is None
    assert reward_of(rules, [event("good", signal=category)]) == 1.0


def test_without_the_answers_time_no_rule_of_time_is_applied():
    rules = content(signals={"thumbs": {**UPDOWN, "delay_s": 60, "half_life_s": 1}}, horizon_s=70)
    assert reward_of(rules, [event(True, after_s=5)]) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"horizon_s": -1},
        {"horizon_s": MAX_TIME_S + 1},
        {"silence": "shout"},
        {"silence_value": 1.5},
        {"episode_discount": 1.1},
        {"episode_discount": float("nan")},
        {"signals": {"thumbs": {**UPDOWN, "half_life_s": -1}}},
        {"signals": {"thumbs": {**UPDOWN, "weight": 0}}},
        {"signals": {"thumbs": {"values": {"true": 2}}}},
        {"signals": {"thumbs": {**UPDOWN, "delay_s": 50, "horizon_s": 50}}},
        {"signals": {"thumbs": {**UPDOWN, "delay_s": 50}}, "horizon_s": 40},
        {"signals": {"thumbs": UPDOWN}, "extra": 1},
    ],
)
def test_a_map_that_cannot_be_is_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        content(**wrong)


def test_horizons_are_the_signals_own_or_the_maps():
    rules = content(horizon_s=100, signals={"thumbs": UPDOWN, "kept": {"horizon_s": 400}})
    assert [rules.horizon_of(slug) for slug in ("thumbs", "kept", "other")] == [100, 400, 100]
    assert rules.longest_horizon_s == 400
    assert content().longest_horizon_s == 0


@pytest.mark.django_db
def test_a_map_is_published_whole_and_an_older_one_still_reads():
    world = lane_world()
    published = signal_map_publish(
        project=world.project,
        content={"signals": {"thumbs": {**UPDOWN, "half_life_s": 5}}, "silence": "value", "silence_value": 0.1},
        author=None,
        actor=ACTOR,
    )
    assert published.content["signals"]["thumbs"]["half_life_s"] == 5
    assert published.content["episode_discount"] == 1.0
    old = {"signals": {"thumbs": {"values": {"true": 1.0}, "low": 0.0, "high": 1.0, "weight": 1.0}}, "silence": "drop"}
    assert msgspec.convert(old, type=SignalMapContent).horizon_s == 0
    with pytest.raises(Invalid, match="half_life_s"):
        signal_map_publish(
            project=world.project,
            content={"signals": {"thumbs": {**UPDOWN, "half_life_s": -5}}},
            author=None,
            actor=ACTOR,
        )
