"""Calls of a remote harness become one trajectory: nothing is trained twice, nothing sampled is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.remote.capture import Captured, assemble
from rl_core.errors import TrajectoryError
from rl_core.types import Ending, FinishReason, Generated, Role, Routes, SamplingParams, ToolCall, VersionSpan

SAMPLING = SamplingParams(max_tokens=8, stop=("x",), seed=3)


def call(number, prompt, sampled, *, parent=-1, messages=None, calls=(), version="l:0-1", routes=None) -> Captured:
    generated = Generated(
        token_ids=list(sampled),
        logprobs=[-float(token) for token in sampled],
        text="",
        finish_reason=FinishReason.STOP,
        spans=[VersionSpan(0, len(sampled), version)],
        prompt_tokens=len(prompt),
        routes=routes,
    )
    return Captured(
        number=number,
        parent=parent,
        messages=messages if messages is not None else [{"role": "user", "content": f"u{number}"}],
        prompt_token_ids=list(prompt),
        generated=generated,
        text=f"a{number}",
        calls=list(calls),
    )


def made(*calls):
    trajectory = assemble(task_id="t", calls=calls, sampling=SAMPLING, ending=Ending.TERMINATED)
    trajectory.validate()
    return trajectory


def test_a_conversation_that_grows_is_one_segment():
    trajectory = made(call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6], parent=0, version="l:0-2"))
    (segment,) = trajectory.segments
    assert segment.token_ids == [1, 2, 3, 4, 5, 6]
    assert segment.loss_mask == [0, 0, 1, 1, 0, 1]
    assert segment.logprobs == [0.0, 0.0, -3.0, -4.0, 0.0, -6.0]
    assert segment.spans == [VersionSpan(2, 4, "l:0-1"), VersionSpan(5, 6, "l:0-2")]
    assert (segment.sampling.stop, segment.sampling.seed) == ((), None)
    assert [(m.role, m.content, m.parent) for m in trajectory.messages] == [
        (Role.USER, "u0", -1),
        (Role.ASSISTANT, "a0", 0),
        (Role.USER, "u1", 1),
        (Role.ASSISTANT, "a1", 2),
    ]
    assert [(m.segment, m.start, m.end) for m in trajectory.messages] == [(-1, 0, 0), (0, 2, 4), (0, 4, 5), (0, 5, 6)]


def test_a_history_that_was_rewritten_is_a_segment_of_its_own():
    trajectory = made(call(0, [1, 2], [3, 4]), call(1, [1, 2, 9, 4, 5], [6]))
    assert [segment.token_ids for segment in trajectory.segments] == [[1, 2, 3, 4], [1, 2, 9, 4, 5, 6]]
    assert [segment.loss_mask for segment in trajectory.segments] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]


def test_the_second_branch_from_a_place_does_not_train_the_place_again():
    trajectory = made(
        call(0, [1], [2]),
        call(1, [1, 2, 3], [4], parent=0),
        call(2, [1, 2, 5], [6], parent=0),
        call(3, [1, 2, 5, 6, 7], [8], parent=2),
    )
    assert [segment.token_ids for segment in trajectory.segments] == [[1, 2, 3, 4], [1, 2, 5, 6, 7, 8]]
    assert [segment.loss_mask for segment in trajectory.segments] == [[0, 1, 0, 1], [0, 0, 0, 1, 0, 1]]
    assert [m.parent for m in trajectory.messages] == [-1, 0, 1, 2, 1, 4, 5, 6]


def test_the_same_messages_twice_are_two_samples():
    trajectory = made(call(0, [1], [2]), call(1, [1], [3]))
    assert [segment.token_ids for segment in trajectory.segments] == [[1, 2], [1, 3]]


def test_what_tools_answered_is_told_of_their_calls():
    tried = [ToolCall(tool="a", arguments="{}", result="", ok=True, turn=0) for _ in range(2)]
    after = [{"role": "tool", "content": "one", "name": "c1"}, {"role": "tool", "content": "two", "name": "c2"}]
    trajectory = made(call(0, [1], [2], calls=tried), call(1, [1, 2, 3], [4], parent=0, messages=after))
    assert [(one.result, one.turn) for one in trajectory.tool_calls] == [("one", 0), ("two", 0)]


def test_routes_are_joined_where_a_segment_goes_on():
    def routes(tokens, fill):
        return Routes(tokens, 1, 1, "uint8", bytes([fill]) * tokens)

    trajectory = made(call(0, [1], [2], routes=routes(1, 7)), call(1, [1, 2, 3], [4], parent=0, routes=routes(3, 8)))
    assert trajectory.segments[0].routes.data == bytes([7, 8, 8])


def test_a_parent_that_was_not_before_is_refused():
    with pytest.raises(TrajectoryError, match="call 1 goes on from call 4"):
        made(call(1, [1], [2], parent=4))


def test_a_blob_is_read_back_and_another_refused():
    one = call(0, [1], [2])
    assert Captured.from_bytes(one.to_bytes()) == one
    with pytest.raises(TrajectoryError):
        Captured.from_bytes(b"\x01")
    one.format = 2
    with pytest.raises(TrajectoryError, match="format 2"):
        Captured.from_bytes(one.to_bytes())


@given(st.data())
def test_every_sampled_token_is_trained_once_whatever_the_harness_does(data):
    calls = []
    for number in range(data.draw(st.integers(1, 12))):
        parent = data.draw(st.integers(-1, number - 1))
        sampled = [1000 * (number + 1) + n for n in range(data.draw(st.integers(1, 3)))]
        context = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        prompt = [*calls[parent].token_ids, *context] if parent >= 0 else context
        calls.append(call(number, prompt, sampled, parent=parent))
    trajectory = made(*data.draw(st.permutations(calls)))
    trained = [
        token
        for segment in trajectory.segments
        for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True)
        if mask
    ]
    assert sorted(trained) == sorted(token for one in calls for token in one.generated.token_ids)
    for one in calls:  # each was sampled after exactly what it read
        assert any(one.token_ids == segment.token_ids[: len(one.token_ids)] for segment in trajectory.segments)
