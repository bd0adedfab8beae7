"""The measured truth, by value."""

import pytest

from controlplane.processes.lane_demo.judgement import PERSONAS
from controlplane.processes.lane_demo.truth import Sample, fact_gain, satisfaction_gain
from rl_core.environments.tasks import Task
from rl_core.types import Split

STRICT, HURRIED, EASY, PATIENT = PERSONAS
GOOD, SURE, BAD = "Bees make honey.", "Sure, bees make honey.", "bees make"


def sample(version: str, *replies: str) -> Sample:
    return Sample(version, {f"q{number}": (text, text) for number, text in enumerate(replies)})


def tasks(*facts: str) -> list[Task]:
    return [
        Task(id=f"q{number}", split=Split.HELDOUT, input={"question": "?"}, reference={"fact": [fact]})
        for number, fact in enumerate(facts)
    ]


def test_satisfaction_is_the_share_of_people_and_replies():
    gain = satisfaction_gain(sample("v0", BAD, SURE), sample("v1", GOOD, SURE), [STRICT, HURRIED])
    assert gain.before == pytest.approx((0 + 0.5) / 2)
    assert gain.after == pytest.approx((1 + 0.5) / 2)
    assert gain.difference.mean == pytest.approx(0.5)
    assert gain.difference.n == 2
    assert (gain.difference.low, gain.difference.high) == (0.0, 1.0)


def test_a_gain_of_everybody_everywhere_has_no_width():
    gain = satisfaction_gain(sample("v0", *[BAD] * 20), sample("v1", *[GOOD] * 20), [EASY] * 10)
    assert (gain.before, gain.after) == (0.0, 1.0)
    assert gain.difference.above_zero
    assert gain.difference.low == gain.difference.high == 1.0


def test_facts_are_counted_apart_from_style():
    gain = fact_gain(sample("v0", BAD, SURE), sample("v1", GOOD, GOOD), tasks("wax", "honey"))
    assert (gain.before, gain.after, gain.difference.mean) == (0.5, 0.5, 0.0)
