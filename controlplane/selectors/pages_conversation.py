"""Reads for the pages: a trajectory as a conversation, with its windows, its calls and what they were answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_core.types import CompactionMessage, Message, Role, ToolCall, Trajectory

MAX_MESSAGE_CHARACTERS = 6000

_NOTES = {
    CompactionMessage.REQUEST.value: "asked for a summary",
    CompactionMessage.SUMMARY.value: "summary",
    CompactionMessage.RESTART.value: "begins again with the summary",
}


@dataclass(frozen=True, slots=True)
class CallView:
    """One of a turn's `of` calls. `result` is empty where a message below shows it."""

    number: int
    of: int
    tool: str
    arguments: str
    ok: bool
    result: str


@dataclass(frozen=True, slots=True)
class WindowMark:
    """Where a context window after the first begins, counted from 1."""

    number: int
    tokens: int
    how: str


@dataclass(slots=True)
class MessageView:
    """One message of the graph. `note` says what it is beside its role; `mark` stands before it.

    Messages that were rendered at once share their tokens: the first has the count (`together`), the others 0.
    """

    index: int
    role: str
    name: str
    content: str
    depth: int
    tokens: int
    together: bool = False
    note: str = ""
    left_out: int = 0
    mark: WindowMark | None = None
    calls: list[CallView] = field(default_factory=list)


def conversation(trajectory: Trajectory) -> list[MessageView]:
    """The graph in order; a message is indented where it branches off, not where it only follows."""
    depths = _depths(trajectory.messages)
    calls: dict[int, list[ToolCall]] = {}
    for call in trajectory.tool_calls:
        calls.setdefault(call.turn, []).append(call)
    views: list[MessageView] = []
    turn, window = 0, 0
    made: list[ToolCall] = []
    answered = 0
    for index, message in enumerate(trajectory.messages):
        view = _view(index, message, depths[index])
        if message.segment > window:
            window = message.segment
            view.mark = _mark(trajectory, message)
        if message.role is Role.ASSISTANT and message.segment >= 0 and not message.name:
            made, answered = calls.get(turn, []), 0
            results = _results(trajectory.messages, index)
            view.calls = [_call(call, n, len(made), shown=n < results) for n, call in enumerate(made)]
            turn += 1
        elif message.role is Role.TOOL and made:
            answered += 1
            view.note = _answer_note(message, answered, len(made))
        if views and _place(message) == _place(trajectory.messages[index - 1]) and view.tokens:
            view.tokens = 0
            first = next(n for n, one in enumerate(trajectory.messages) if _place(one) == _place(message))
            views[first].together = True
        views.append(view)
    return views


def _place(message: Message) -> tuple[int, int, int]:
    return message.segment, message.start, message.end


def _depths(messages: list[Message]) -> list[int]:
    depths: list[int] = []
    children: dict[int, int] = {}
    for index, message in enumerate(messages):
        seen = children.get(message.parent, 0)
        children[message.parent] = seen + 1
        base = depths[message.parent] if 0 <= message.parent < index else 0
        depths.append(base + (1 if seen and message.parent >= 0 else 0))
    return depths


def _view(index: int, message: Message, depth: int) -> MessageView:
    note = _NOTES.get(message.name, "")
    return MessageView(
        index=index,
        role=message.role.value,
        name="" if note else message.name,
        content=message.content[:MAX_MESSAGE_CHARACTERS],
        depth=depth,
        tokens=max(0, message.end - message.start),
        note=note,
        left_out=max(0, len(message.content) - MAX_MESSAGE_CHARACTERS),
    )


def _results(messages: list[Message], index: int) -> int:
    """How many messages with results belong to the turn at `index`: all until the next turn, summaries aside."""
    count = 0
    for message in messages[index + 1 :]:
        if message.role is Role.ASSISTANT and not message.name:
            break
        count += message.role is Role.TOOL
    return count


def _call(call: ToolCall, number: int, of: int, *, shown: bool) -> CallView:
    result = "" if shown else call.result[:MAX_MESSAGE_CHARACTERS]
    return CallView(number + 1, of, call.tool, call.arguments[:MAX_MESSAGE_CHARACTERS], call.ok, result)


def _answer_note(message: Message, number: int, of: int) -> str:
    note = f"answers call {number} of {of}" if of > 1 else ""
    if message.segment < 0:
        note = f"{note}, never read" if note else "never read"
    return note


def _mark(trajectory: Trajectory, message: Message) -> WindowMark:
    tokens = trajectory.segments[message.segment].loss_mask
    before = tokens.index(1) if 1 in tokens else len(tokens)
    summarised = any(
        other.segment == message.segment and other.name == CompactionMessage.RESTART for other in trajectory.messages
    )
    how = "the task and the summary" if summarised else "the same turns without the oldest results"
    return WindowMark(message.segment + 1, before, how)
