"""Records: versions are ordered, trajectories add up, errors can travel."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core import errors
from rl_core.errors import RlCoreError, SpecError, TrajectoryError
from rl_core.types import (
    Message,
    Role,
    SamplingParams,
    TokenSegment,
    Trajectory,
    VersionRef,
    VersionSpan,
)

numbers = st.integers(0, 999_999_999)


@given(epoch=numbers, number=numbers)
def test_a_version_reads_back(epoch, number):
    ref = VersionRef("0192f0c4-aa", epoch, number)
    assert VersionRef.parse(str(ref)) == ref


@pytest.mark.parametrize("text", ["", "x", "a:1", "a:1-", "a:-1-2", "a b:1-2", "a:1-2\n", "a:1-99999999999"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(SpecError):
        VersionRef.parse(text)


def test_epoch_orders_before_number():
    assert VersionRef("a", 1, 0) > VersionRef("a", 0, 9)


@pytest.mark.parametrize(
    ("minimum", "exact", "expected"),
    [
        (None, None, True),
        (VersionRef("a", 0, 3), None, True),
        (VersionRef("a", 0, 4), None, False),
        (VersionRef("b", 0, 1), None, False),
        (None, VersionRef("a", 0, 3), True),
        (None, VersionRef("a", 1, 3), False),
    ],
)
def test_bounds_of_requests(minimum, exact, expected):
    assert VersionRef("a", 0, 3).satisfies(min_version=minimum, exact_version=exact) is expected


def trajectory(**changes):
    segment = {
        "token_ids": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "logprobs": [0.0, -1.0, -2.0],
        "spans": [VersionSpan(1, 2, "a:0-1"), VersionSpan(2, 3, "a:0-2")],
        "sampling": SamplingParams(),
    }
    messages = [Message(role=Role.USER, content="hi"), Message(role=Role.ASSISTANT, content="yo", parent=0)]
    return Trajectory(task_id="t", messages=messages, segments=[TokenSegment(**{**segment, **changes})])


def test_a_trajectory_reads_back_and_counts():
    made = trajectory()
    again = Trajectory.from_bytes(made.to_bytes())
    assert again == made
    assert again.versions() == ["a:0-1", "a:0-2"]
    assert again.sampled_tokens() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"loss_mask": [0, 1]},
        {"logprobs": [0.0]},
        {"spans": [VersionSpan(1, 3, "a:0-1"), VersionSpan(2, 3, "a:0-2")]},
        {"spans": [VersionSpan(1, 2, "a:0-1")]},
        {"spans": [VersionSpan(1, 9, "a:0-1")]},
        {"spans": [VersionSpan(2, 2, "a:0-1")]},
        {"spans": [VersionSpan(0, 3, "a:0-1")]},
    ],
)
def test_what_does_not_add_up_is_not_written(change):
    with pytest.raises(TrajectoryError):
        trajectory(**change).to_bytes()


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(blob):
    with pytest.raises(TrajectoryError):
        Trajectory.from_bytes(blob)


def test_a_cut_blob_is_refused():
    blob = trajectory().to_bytes()
    with pytest.raises(TrajectoryError):
        Trajectory.from_bytes(blob[:-1])


def test_a_message_names_an_earlier_parent_alone():
    made = trajectory()
    made.messages = [Message(role=Role.USER, content="", parent=1), Message(role=Role.USER, content="")]
    with pytest.raises(TrajectoryError):
        made.to_bytes()


def test_a_format_of_the_future_is_refused():
    made = trajectory()
    made.format = 2
    with pytest.raises(TrajectoryError, match="upgrade"):
        made.validate()


ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RlCoreError)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_can_be_pickled_and_have_a_code(kind):
    error = pickle.loads(pickle.dumps(kind("what to do")))
    assert (type(error), str(error)) == (kind, "what to do")
    assert error.code == kind.code
    assert isinstance(kind.retryable, bool)


def test_codes_are_unique():
    codes = [kind.code for kind in ERRORS]
    assert len(codes) == len(set(codes))
