"""How each turn of a rollout behaved, counted as answers to users are, so that the two can be compared."""

from __future__ import annotations

from collections import defaultdict

from rl_core.signals.behaviour import behaviour_of
from rl_core.types import Role, ToolCall, Trajectory

COUNTED = ("tokens", "tool_calls", "refusal")
MAX_TURNS = 50


def behaviour_by_turn(trajectory: Trajectory) -> list[list[int]]:
    """The numbers of COUNTED for each of the first MAX_TURNS turns; summaries are none.

    Failed calls are not among them: of an answer to a user it is known whether a call is malformed, not whether its
    tool failed.
    """
    calls: defaultdict[int, list[ToolCall]] = defaultdict(list)
    for call in trajectory.tool_calls:
        calls[call.turn].append(call)
    turns = [
        message
        for message in trajectory.messages
        if message.role is Role.ASSISTANT and message.segment >= 0 and not message.name
    ]
    found = [
        behaviour_of(turn.content, calls[number], tokens=turn.end - turn.start)
        for number, turn in enumerate(turns[:MAX_TURNS])
    ]
    return [[int(one[key]) for key in COUNTED] for one in found]
