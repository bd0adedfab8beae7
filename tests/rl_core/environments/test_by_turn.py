"""A rollout's turns are counted one by one, as answers to users are."""

from rl_core.environments.by_turn import COUNTED, MAX_TURNS, behaviour_by_turn
from rl_core.types import Message, Role, ToolCall, Trajectory


def said(text, start, end, *, name="", segment=0):
    return Message(role=Role.ASSISTANT, content=text, segment=segment, start=start, end=end, name=name)


def call(turn, *, ok=True):
    return ToolCall(tool="t", arguments="{}", result="", ok=ok, turn=turn)


def test_each_turn_has_its_own_tokens_calls_and_refusal():
    messages = [
        said("an example of the opening", 0, 0, segment=-1),
        said("two calls", 4, 9),
        said("what I did so far", 9, 20, name="summary"),
        said("I cannot help with that.", 3, 10, segment=1),
        said("a call", 12, 14, segment=1),
    ]
    played = Trajectory(task_id="t", messages=messages, segments=[], tool_calls=[call(0), call(0, ok=False), call(2)])
    assert COUNTED == ("tokens", "tool_calls", "refusal")
    assert behaviour_by_turn(played) == [[5, 2, 0], [7, 0, 1], [2, 1, 0]]


def test_a_long_session_is_kept_short():
    played = Trajectory(task_id="t", messages=[said("x", n, n + 1) for n in range(MAX_TURNS + 9)], segments=[])
    assert len(behaviour_by_turn(played)) == MAX_TURNS
