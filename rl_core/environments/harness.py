"""The turn loop: generate, find the calls, make them, append the exact tokens, check the limits.

Token in, token out: what was sampled is never tokenised again. A `Session` is plain data after every turn and can be
stored and taken up by another process. A step changes its session only once everything it awaited has succeeded, so
that a turn that failed halfway can simply be played again: its seed depends on the turn alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from rl_core.chat import ChatTokenizer
from rl_core.environments.calls import Answered, Caller
from rl_core.environments.compaction import Compactor
from rl_core.environments.environment import Environment
from rl_core.environments.opening import OpeningRenderer
from rl_core.environments.session import SeedKey, Session
from rl_core.environments.tasks import Task
from rl_core.environments.transcript import (
    NOWHERE,
    append_message,
    append_sampled,
    check_generated,
    end_session,
    new_segment,
)
from rl_core.environments.world import World
from rl_core.session_specs import Limits
from rl_core.types import (
    CompactionMessage,
    Ending,
    FinishReason,
    Generated,
    Role,
    SamplingParams,
    ToolCall,
    Trajectory,
)


class Policy(Protocol):
    """What a harness needs of an engine."""

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams) -> Generated:
        """Sample a continuation, token in, token out. Raises: EngineError."""
        ...


class Harness:
    """The turn loop of one environment under one model's chat template."""

    def __init__(
        self, environment: Environment, chat: ChatTokenizer, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._environment = environment
        self._chat = chat
        self._clock = clock
        self._openings = OpeningRenderer(environment, chat)
        self._compactor = Compactor(chat, self._openings, tool_role=environment.tool_role)

    def start(
        self, task: Task, *, sampling: SamplingParams, limits: Limits, seed: SeedKey, key: str = "session"
    ) -> Session:
        """A session that has said nothing yet: the task's prompt, rendered once. `key` names it to its world."""
        opening = self._openings.render(task)
        stops = self._environment.stops(parallel=limits.max_parallel_calls)
        session = Session(
            environment=self._environment.slug,
            task=task,
            sampling=msgspec.structs.replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *stops))), seed=None),
            limits=limits,
            seed=seed,
            key=key,
            trajectory=Trajectory(task_id=task.id, messages=opening.messages, segments=[]),
        )
        new_segment(session, opening.token_ids)
        if self._room(session) < 1:
            end_session(session, Ending.TRUNCATED)
        return session

    async def step(self, session: Session, *, policy: Policy, world: World) -> None:
        """Play one turn, or let the policy write a summary. Does nothing when the session is done.

        Raises: EngineError and WorldError; the session is then as before, and the step may be taken again.
        """
        if session.done:
            return
        began = self._clock()
        draft = session.draft()
        if draft.world_state is None:
            draft.world_state = await world.open(task=draft.task, key=draft.key)
        if draft.summarising:
            await self._summary(draft, policy=policy)
        else:
            await self._turn(draft, draft.world_state, policy=policy, world=world)
        draft.wall_s += self._clock() - began
        if not draft.done and (self._room(draft) < 1 or 0 < draft.limits.max_wall_s <= draft.wall_s):
            end_session(draft, Ending.TRUNCATED)
        if draft.done:
            exported = await world.export(task=draft.task, state=draft.world_state)
            draft.trajectory.artifacts = {**draft.trajectory.artifacts, **exported}
        session.adopt(draft)

    async def _turn(self, draft: Session, state: bytes, *, policy: Policy, world: World) -> None:
        """Sample a turn, make its calls, append both."""
        generated, text = await self._sample(draft, policy, stop=draft.sampling.stop)
        caller = Caller(
            world=world,
            task=draft.task,
            tools=self._environment.tools,
            turn_key=f"{draft.key}/{draft.turn}",
            limit=draft.limits.max_parallel_calls,
        )
        answered, draft.world_state = await caller.answer(self._environment.find_calls(text), state)
        append_sampled(draft, generated, text)
        draft.turn += 1
        if answered:
            self._append_calls(draft, answered, last_token=generated.token_ids[-1])
        else:
            cut = generated.finish_reason is FinishReason.LENGTH
            end_session(draft, Ending.TRUNCATED if cut else Ending.TERMINATED)

    async def _summary(self, draft: Session, *, policy: Policy) -> None:
        """Sample the summary that was asked for, and go on from it. What ends a call does not end a summary."""
        generated, text = await self._sample(draft, policy, stop=())
        append_sampled(draft, generated, text, name=CompactionMessage.SUMMARY.value)
        self._compactor.restart(draft, text, cut=generated.finish_reason is FinishReason.LENGTH)

    async def _sample(self, draft: Session, policy: Policy, *, stop: tuple[str, ...]) -> tuple[Generated, str]:
        seed = draft.seed.of_turn(draft.turn + draft.compactions) if draft.sampling.temperature > 0 else None
        sampling = msgspec.structs.replace(draft.sampling, max_tokens=self._room(draft), stop=stop, seed=seed)
        generated = await policy.generate(list(draft.trajectory.segments[-1].token_ids), sampling)
        check_generated(generated)
        return generated, self._chat.decode(generated.token_ids)

    def _room(self, session: Session) -> int:
        """How many tokens may be sampled next."""
        limits = session.limits
        filled = len(session.trajectory.segments[-1].token_ids)
        room = min(session.sampling.max_tokens, self._compactor.budget(limits) - filled)
        if session.summarising:
            room = min(limits.compaction.summary_tokens, limits.max_context_tokens - filled)
        if limits.max_sampled_tokens:
            room = min(room, limits.max_sampled_tokens - session.trajectory.sampled_tokens())
        return room

    def _append_calls(self, draft: Session, answered: list[Answered], *, last_token: int) -> None:
        """Record the calls, and give their results to the policy if there is a next turn."""
        trajectory = draft.trajectory
        for one in answered:
            trajectory.artifacts.update(one.result.artifacts)
            trajectory.tool_calls.append(
                ToolCall(
                    tool=one.call.tool,
                    arguments=one.arguments,
                    result=one.result.text,
                    ok=one.result.ok,
                    turn=draft.turn - 1,
                )
            )
        solved = any(one.result.solved for one in answered)
        if not solved and draft.turn < draft.limits.max_turns:
            self._compactor.append_results(draft, answered, last_token=last_token)
            return
        for one in answered:
            append_message(trajectory, Role.TOOL, one.result.text, NOWHERE, name=one.call.tool)
        end_session(draft, Ending.TERMINATED if solved else Ending.TRUNCATED)
