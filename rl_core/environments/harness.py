"""The turn loop: generate, parse the tool call, run it, append the exact tokens, check the limits.

Token in, token out: what was sampled is never tokenised again. A `Session` is plain data after every turn and can be
stored and taken up by another process. A step changes its session only once everything it awaited has succeeded, so
that a turn that failed halfway can simply be played again: its seed depends on the turn alone.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from blake3 import blake3

from rl_core.chat import ChatTokenizer
from rl_core.environments.environment import Environment
from rl_core.environments.routes import join_routes
from rl_core.environments.tasks import Task
from rl_core.environments.tool_syntax import Call, NoCall, parse_call
from rl_core.environments.world import ToolResult, World
from rl_core.errors import EngineUnreachable, TrajectoryError
from rl_core.types import (
    Ending,
    FinishReason,
    Generated,
    Message,
    Role,
    SamplingParams,
    TokenSegment,
    ToolCall,
    Trajectory,
    VersionSpan,
)

SESSION_FORMAT = 1


class Policy(Protocol):
    """What a harness needs of an engine."""

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams) -> Generated:
        """Sample a continuation, token in, token out. Raises: EngineError."""
        ...


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a session is cut off. `max_sampled_tokens` 0 means no bound over the turns' own."""

    max_turns: int = 2
    max_context_tokens: int = 1024
    max_sampled_tokens: int = 0


class SeedKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes an attempt's random numbers its own, and the same again when it is retried."""

    run_seed: int
    group: str
    attempt: int

    def of_turn(self, turn: int) -> int:
        """A seed below 2^48 for one turn: equal for equal keys, unrelated otherwise."""
        text = f"{self.run_seed}/{self.group}/{self.attempt}/{turn}"
        return int.from_bytes(blake3(text.encode()).digest(length=6), "big")


class Session(msgspec.Struct, kw_only=True):
    """One attempt at a task, between turns."""

    environment: str
    task: Task
    sampling: SamplingParams
    limits: Limits
    seed: SeedKey
    trajectory: Trajectory
    turn: int = 0
    done: bool = False
    format: int = SESSION_FORMAT

    def to_bytes(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Session:
        """Decode. Raises: TrajectoryError."""
        try:
            session = msgspec.msgpack.decode(blob, type=cls)
        except msgspec.DecodeError as error:
            raise TrajectoryError(f"not a session blob: {error}") from error
        if session.format != SESSION_FORMAT:
            raise TrajectoryError(f"session format {session.format} is unknown to this build; start the rollout again")
        session.trajectory.validate()
        return session


class Harness:
    """The turn loop of one environment under one model's chat template."""

    def __init__(self, environment: Environment, chat: ChatTokenizer) -> None:
        self._environment = environment
        self._chat = chat

    def start(self, task: Task, *, sampling: SamplingParams, limits: Limits, seed: SeedKey) -> Session:
        """A session that has said nothing yet: the task's prompt, rendered once."""
        opening = self._environment.messages(task)
        prompt_ids = self._chat.render([{"role": m.role.value, "content": m.content} for m in opening])
        tool = self._environment.tool
        stop = tuple(dict.fromkeys((*sampling.stop, tool.close))) if tool else sampling.stop
        sampling = msgspec.structs.replace(sampling, stop=stop, seed=None)
        segment = TokenSegment(
            token_ids=prompt_ids,
            loss_mask=[0] * len(prompt_ids),
            logprobs=[0.0] * len(prompt_ids),
            spans=[],
            sampling=sampling,
        )
        messages = [msgspec.structs.replace(m, parent=i - 1) for i, m in enumerate(opening)]
        trajectory = Trajectory(task_id=task.id, messages=messages, segments=[segment])
        session = Session(
            environment=self._environment.slug,
            task=task,
            sampling=sampling,
            limits=limits,
            seed=seed,
            trajectory=trajectory,
        )
        if self._room(session) < 1:
            _end(session, Ending.TRUNCATED)
        return session

    async def step(self, session: Session, *, policy: Policy, world: World) -> None:
        """Play one turn. Does nothing when the session is done.

        Raises: EngineError and WorldError; the session is then as before, and the step may be taken again.
        """
        if session.done:
            return
        segment = session.trajectory.segments[-1]
        seed = session.seed.of_turn(session.turn) if session.sampling.temperature > 0 else None
        sampling = msgspec.structs.replace(session.sampling, max_tokens=self._room(session), seed=seed)
        generated = await policy.generate(list(segment.token_ids), sampling)
        _check(generated)
        text = self._chat.decode(generated.token_ids)
        tool, result, arguments = self._environment.tool, None, text
        call = parse_call(tool, text) if tool else NoCall.ABSENT
        if tool and isinstance(call, Call):
            arguments = call.arguments
            result = await world.call(task=session.task, tool=tool.name, arguments=arguments)
        elif tool and call is NoCall.MALFORMED:
            result = ToolResult(text=tool.complaint, ok=False)
        _append_turn(session, generated, text)
        if tool and result:
            self._append_result(session, generated, tool.name, arguments, result)
        else:
            cut = generated.finish_reason is FinishReason.LENGTH
            _end(session, Ending.TRUNCATED if cut else Ending.TERMINATED)

    def _room(self, session: Session) -> int:
        """How many tokens the next turn may sample."""
        limits = session.limits
        room = min(
            session.sampling.max_tokens,
            limits.max_context_tokens - len(session.trajectory.segments[-1].token_ids),
        )
        if limits.max_sampled_tokens:
            room = min(room, limits.max_sampled_tokens - session.trajectory.sampled_tokens())
        return room

    def _append_result(
        self, session: Session, generated: Generated, tool: str, arguments: str, result: ToolResult
    ) -> None:
        """Record the call, and give its result to the policy if there is a next turn."""
        trajectory = session.trajectory
        trajectory.tool_calls.append(
            ToolCall(
                tool=tool,
                arguments=arguments,
                result=result.text,
                ok=result.ok,
                turn=session.turn - 1,
            )
        )
        trajectory.artifacts = {**trajectory.artifacts, **result.artifacts}
        message = Message(
            role=Role.TOOL,
            content=result.text,
            parent=len(trajectory.messages) - 1,
            name=tool,
        )
        if result.solved or session.turn >= session.limits.max_turns:
            trajectory.messages.append(message)
            _end(session, Ending.TERMINATED if result.solved else Ending.TRUNCATED)
            return
        segment = trajectory.segments[-1]
        start = len(segment.token_ids)
        after = [{"role": self._environment.tool_role.value, "content": result.text}]
        ids = self._chat.continuation(after, last_token=generated.token_ids[-1])
        if start + len(ids) >= session.limits.max_context_tokens:
            trajectory.messages.append(message)
            _end(session, Ending.TRUNCATED)
            return
        _extend(segment, ids, mask=0, logprobs=[0.0] * len(ids))
        end = len(segment.token_ids)
        place = {"segment": len(trajectory.segments) - 1, "start": start, "end": end}
        trajectory.messages.append(msgspec.structs.replace(message, **place))
        if self._room(session) < 1:
            _end(session, Ending.TRUNCATED)


def _check(generated: Generated) -> None:
    """Raises: EngineUnreachable when a generation was cut off by others or does not add up."""
    if generated.finish_reason is FinishReason.ABORT:
        raise EngineUnreachable("the engine aborted the generation; the turn will be played again")
    if not generated.token_ids or len(generated.token_ids) != len(generated.logprobs):
        raise EngineUnreachable(
            f"the engine answered {len(generated.token_ids)} tokens with {len(generated.logprobs)} logprobs"
        )


def _append_turn(session: Session, generated: Generated, text: str) -> None:
    """Append the sampled tokens exactly as sampled."""
    trajectory = session.trajectory
    segment = trajectory.segments[-1]
    start = len(segment.token_ids)
    _extend(segment, generated.token_ids, mask=1, logprobs=generated.logprobs)
    segment.spans += [VersionSpan(start + span.start, start + span.end, span.version) for span in generated.spans]
    segment.routes = join_routes(segment.routes, generated.routes, first_turn=session.turn == 0)
    trajectory.messages.append(
        Message(
            role=Role.ASSISTANT,
            content=text,
            parent=len(trajectory.messages) - 1,
            segment=len(trajectory.segments) - 1,
            start=start,
            end=len(segment.token_ids),
        )
    )
    session.turn += 1


def _extend(segment: TokenSegment, ids: list[int], *, mask: int, logprobs: list[float]) -> None:
    segment.token_ids += ids
    segment.loss_mask += [mask] * len(ids)
    segment.logprobs += logprobs


def _end(session: Session, ending: Ending) -> None:
    session.trajectory.ending = ending
    session.done = True
