"""What a remote harness asked the policy, call by call, made into one trajectory: token in, token out.

A call that extends the conversation of an earlier one with exactly what that was answered goes on in its segment, with
the tokens that were sampled. Every other call (history was rewritten, or a second branch from the same place) begins a
segment of its own, in which all that it read is context. So every sampled token is in the trajectory once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rl_core.environments.routes import join_routes
from rl_core.errors import TrajectoryError
from rl_core.types import (
    Ending,
    Generated,
    Message,
    Role,
    SamplingParams,
    TokenSegment,
    ToolCall,
    Trajectory,
    VersionSpan,
)

NOWHERE = -1


class Captured(msgspec.Struct, kw_only=True):
    """One answered call. `parent` is the number of the call whose tokens `prompt_token_ids` begins with, or -1.

    `messages` are those that came since the parent's answer (all, without a parent), as role, content and maybe name.
    `text` is what was sampled, `calls` the tool calls tried in it.
    """

    number: int
    parent: int = NOWHERE
    messages: list[dict[str, str]]
    prompt_token_ids: list[int]
    generated: Generated
    text: str
    calls: list[ToolCall] = []
    format: int = 1

    def to_bytes(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Captured:
        """Decode. Raises: TrajectoryError."""
        try:
            captured = msgspec.msgpack.decode(blob, type=cls)
        except msgspec.DecodeError as error:
            raise TrajectoryError(f"not a captured call: {error}") from error
        if captured.format != 1:
            raise TrajectoryError(f"captured calls of format {captured.format} are unknown to this build")
        return captured

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the conversation after the answer."""
        return [*self.prompt_token_ids, *self.generated.token_ids]


def assemble(
    *,
    task_id: str,
    calls: Sequence[Captured],
    sampling: SamplingParams,
    ending: Ending | None = None,
    reported: dict[str, float] | None = None,
) -> Trajectory:
    """The trajectory of a session's calls, in the order of their numbers. Equal calls give equal trajectories.

    Raises: TrajectoryError when a call names a parent that was not before it.
    """
    building = _Building(Trajectory(task_id=task_id, messages=[], segments=[], reported=reported or {}), sampling)
    for call in sorted(calls, key=lambda one: one.number):
        building.add(call)
    building.trajectory.ending = ending
    return building.trajectory


class _Building:
    """A trajectory under way. `ends` says where each call's answer stands: its segment, message and tool calls."""

    def __init__(self, trajectory: Trajectory, sampling: SamplingParams) -> None:
        self.trajectory = trajectory
        self._sampling = msgspec.structs.replace(sampling, stop=(), seed=None)
        self._ends: dict[int, tuple[int, int, range]] = {}

    def add(self, call: Captured) -> None:
        segment_index, continues = self._segment_of(call)
        segment = self.trajectory.segments[segment_index]
        begun = len(segment.token_ids)
        _extend(segment, call.prompt_token_ids[begun:], mask=0, logprobs=None)
        parent = self._messages(call, place=(segment_index, begun) if continues else None)
        start = len(segment.token_ids)
        generated = call.generated
        _extend(segment, generated.token_ids, mask=1, logprobs=generated.logprobs)
        segment.spans += [VersionSpan(start + one.start, start + one.end, one.version) for one in generated.spans]
        segment.routes = join_routes(segment.routes, generated.routes, first_turn=not continues)
        self.trajectory.messages.append(
            Message(
                role=Role.ASSISTANT,
                content=call.text,
                parent=parent,
                segment=segment_index,
                start=start,
                end=len(segment.token_ids),
            )
        )
        tried = len(self.trajectory.tool_calls)
        self.trajectory.tool_calls += [msgspec.structs.replace(one, turn=call.number) for one in call.calls]
        here = range(tried, len(self.trajectory.tool_calls))
        self._ends[call.number] = segment_index, len(self.trajectory.messages) - 1, here

    def _segment_of(self, call: Captured) -> tuple[int, bool]:
        """The segment in which the call goes on, or a new one; whether it goes on."""
        if call.parent != NOWHERE:
            if call.parent not in self._ends:
                raise TrajectoryError(f"call {call.number} goes on from call {call.parent}, which was not before it")
            index = self._ends[call.parent][0]
            tokens = self.trajectory.segments[index].token_ids
            # Another branch may have gone on from the parent already: its tokens are no beginning of this prompt.
            if call.prompt_token_ids[: len(tokens)] == tokens and len(call.prompt_token_ids) > len(tokens):
                return index, True
        empty = TokenSegment(token_ids=[], loss_mask=[], logprobs=[], spans=[], sampling=self._sampling)
        self.trajectory.segments.append(empty)
        return len(self.trajectory.segments) - 1, False

    def _messages(self, call: Captured, *, place: tuple[int, int] | None) -> int:
        """Append what came before the answer; the index of the last message."""
        _, parent, tried = self._ends.get(call.parent, (0, NOWHERE, range(0)))
        results = iter(tried)
        where = {}
        if place is not None:  # messages that are rendered together share their place
            end = len(self.trajectory.segments[place[0]].token_ids)
            where = {"segment": place[0], "start": place[1], "end": end}
        for one in call.messages:
            message = Message(role=Role(one["role"]), content=one["content"], parent=parent, name=one.get("name", ""))
            self.trajectory.messages.append(msgspec.structs.replace(message, **where))
            parent = len(self.trajectory.messages) - 1
            if message.role is Role.TOOL and (index := next(results, None)) is not None:
                self._result(index, message.content)
        return parent

    def _result(self, index: int, text: str) -> None:
        """What the harness answered a tool call, unless another branch was answered before."""
        tried = self.trajectory.tool_calls[index]
        if not tried.result:
            self.trajectory.tool_calls[index] = msgspec.structs.replace(tried, result=text)


def _extend(segment: TokenSegment, ids: list[int], *, mask: int, logprobs: list[float] | None) -> None:
    segment.token_ids += ids
    segment.loss_mask += [mask] * len(ids)
    segment.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)
