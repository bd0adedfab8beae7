"""The rollout queue: recorded prompts of a lane, replayed on a release's candidate. Nothing of it reaches a user."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from controlplane.models import Generation, ReplicaSlot
from controlplane.selectors.answering import answering_slots, on_loan
from controlplane.selectors.lane_routes import inference_token
from controlplane.selectors.replica_tokens import replica_reach
from controlplane.services.shadows import Replay, ShadowPlan, shadow_plan, shadow_record
from controlplane.states import WorkKind
from rl_core.engines.client import EngineClient
from rl_core.environments.reward import Rubric, combine, grade, parse_rubric
from rl_core.environments.tasks import Task
from rl_core.errors import EngineError, EngineUnreachable, EnvironmentFault, StoreError, TrajectoryError
from rl_core.signals.behaviour import behaviour_of
from rl_core.tool_calls import CallFinder, known_tools
from rl_core.types import Generated, Message, Role, Split, Trajectory, VersionRef
from workers.base import Attempt, store, unit_task

log = structlog.get_logger(__name__)

AT_ONCE = 4  # users come first
BUDGET_S = 300.0
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the candidate answers."""

    client: EngineClient
    slot: str
    version: VersionRef


@unit_task(WorkKind.SHADOW)
def shadow(attempt: Attempt) -> None:
    """One release's prompts. What is not answered within the budget counts as not answered."""
    plan = shadow_plan(attempt.claim)
    if plan is None:
        return
    recorded = [read for prompt in plan.prompts if (read := _recorded(prompt)) is not None]
    replays = asyncio.run(_replay_all(plan, recorded, attempt)) if recorded else []
    attempt.check()
    shadow_record(attempt.claim, asked=len(recorded), replays=replays)
    log.info("shadow_replayed", release=str(plan.release.pk), asked=len(recorded), answered=len(replays))


def _recorded(prompt: Generation) -> Trajectory | None:
    """What was said and sampled; None when it was erased meanwhile, or redacted: its tokens are not kept then."""
    try:
        recorded = Trajectory.from_bytes(store().get_blob(prompt.content_key))
    except (StoreError, TrajectoryError) as error:
        log.info("prompt_not_read", generation=str(prompt.id), error=str(error)[:200])
        return None
    return recorded if recorded.segments and any(recorded.segments[0].loss_mask) else None


async def _replay_all(plan: ShadowPlan, recorded: list[Trajectory], attempt: Attempt) -> list[Replay]:
    places = await asyncio.to_thread(_places, plan)
    if not places:
        raise EngineUnreachable(f"no replica of the lane holds {plan.release.version} now")
    rubric = parse_rubric({"slug": plan.rubric.rubric.slug, "criteria": plan.rubric.criteria}) if plan.rubric else None
    gate, until_s = asyncio.Semaphore(AT_ONCE), time.monotonic() + BUDGET_S

    async def one(number: int, prompt: Trajectory) -> Replay | None:
        async with gate:
            if attempt.lost.is_set() or time.monotonic() > until_s:
                return None
            return await _replay(plan, rubric, prompt, places[number % len(places)])

    try:
        found = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(recorded)))
    finally:
        for place in places:
            await place.client.aclose()
    return [replay for replay in found if replay is not None]


def _places(plan: ShadowPlan) -> list[_Place]:
    slots = ReplicaSlot.objects.filter(
        answering_slots(),
        ~on_loan(),
        replica__cluster=plan.release.lane.cluster_id,
        current_version=plan.release.version_id,
    )
    found = []
    for slot in slots.select_related("replica").order_by("replica_id"):
        with suppress(EngineUnreachable):  # its URL is none
            reach = replica_reach(slot.replica.enrolment)
            client = EngineClient(slot.replica.inference_url, inference_token(slot.replica), reach=reach)
            found.append(_Place(client, slot.slot, plan.release.version.ref))
    return found


async def _replay(plan: ShadowPlan, rubric: Rubric | None, recorded: Trajectory, place: _Place) -> Replay | None:
    """Both answers to one prompt as counts; None when the candidate gave none."""
    segment = recorded.segments[0]
    start = segment.loss_mask.index(1)
    sampling = msgspec.structs.replace(segment.sampling, max_tokens=min(plan.max_tokens, segment.sampling.max_tokens))
    try:
        answer = await place.client.generate(
            segment.token_ids[:start], sampling, exact_version=place.version, slot=place.slot, background=True
        )
    except EngineError as error:
        log.info("prompt_not_answered", generation=recorded.task_id, error=str(error)[:200])
        return None
    known, said = _tools(recorded), recorded.messages[-1].content
    return Replay(
        candidate=_counts(answer.text, len(answer.token_ids), known),
        incumbent=_counts(said, sum(segment.loss_mask), known),
        candidate_grade=await _grade(rubric, _answered(recorded, answer)),
        incumbent_grade=await _grade(rubric, recorded),
    )


def _tools(recorded: Trajectory) -> dict[str, frozenset[str]]:
    """The tools that the prompt showed, so that both answers are read as the gateway read the first."""
    tools = [
        {"function": msgspec.json.decode(line)}
        for message in recorded.messages
        if message.role == Role.SYSTEM and (shown := _TOOLS.search(message.content))
        for line in shown.group(1).splitlines()
    ]
    return known_tools(tools)


def _counts(text: str, tokens: int, known: Mapping[str, frozenset[str]]) -> dict[str, int | bool]:
    finder = CallFinder(known)
    pieces = [*finder.push(text), *finder.finish()]
    shown = "".join(piece for piece in pieces if isinstance(piece, str))
    return behaviour_of(shown, finder.attempts, tokens=tokens)


def _answered(recorded: Trajectory, answer: Generated) -> Trajectory:
    """The recorded conversation with the candidate's answer in place of what the user got."""
    last = recorded.messages[-1]
    reply = Message(role=Role.ASSISTANT, content=answer.text, parent=last.parent, segment=0)
    return msgspec.structs.replace(recorded, messages=[*recorded.messages[:-1], reply], tool_calls=[])


async def _grade(rubric: Rubric | None, trajectory: Trajectory) -> float | None:
    """What the rubric gives; None without one, and where a criterion cannot say. An error is never a grade.

    What users wrote is not sent to graders elsewhere.
    """
    if rubric is None:
        return None
    task = Task(id=trajectory.task_id, split=Split.HELDOUT, input={}, reference={})
    try:
        return combine(rubric, await grade(rubric, task=task, trajectory=trajectory, sandbox=None))
    except EnvironmentFault as error:
        log.info("reply_not_graded", error=str(error)[:200])
        return None
