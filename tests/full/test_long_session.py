"""The real model outlives its context window: thirty turns, summaries of its own between them, and a step on it all."""

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from rl_core.chat import ChatTokenizer
from rl_core.engines.engine import Engine
from rl_core.engines.protocol import ComputeDtype as EngineDtype
from rl_core.engines.request import Request
from rl_core.engines.scheduler import SchedulerLimits
from rl_core.environments.harness import Harness
from rl_core.environments.session import SeedKey, Session
from rl_core.environments.tasks import Task
from rl_core.environments.tool_syntax import Call, Tool
from rl_core.environments.word_problems import ENVIRONMENT
from rl_core.environments.world import Stateless, ToolResult
from rl_core.models.parameters import ComputeDtype
from rl_core.session_specs import CompactionKind, CompactionSpec, Limits
from rl_core.specs import OptimizerSpec, RlStage
from rl_core.trainer.batch import TrainRollout
from rl_core.trainer.trainer import Trainer
from rl_core.types import Message, Role, SamplingParams, Split

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

MODEL = Path(__file__).parents[2] / "var/models/smollm2-135m-instruct"
TURNS, WINDOW, ATTEMPTS = 30, 900, 2
ROOMS = ["hall", "kitchen", "library", "cellar", "attic", "garden", "chapel", "tower", "stable", "pantry"]
COMPACTION = CompactionSpec(
    kind=CompactionKind.SUMMARISE,
    summary_tokens=128,
    request="Stop. In one short sentence: which rooms have you seen?",
)
SAMPLING = SamplingParams(max_tokens=24, temperature=0.7)


class EveryTurn:
    """A syntax for a model that was not trained on tools: each turn is a move."""

    def stops(self, *, parallel):
        return ()

    def find(self, tools, text):
        return [Call("go", {"to": text})]


class House(Stateless):
    """A world that has much to say of every room."""

    async def call(self, *, task, tool, arguments, state, step):
        number = int(step.split("/")[1])
        room = ROOMS[number % len(ROOMS)]
        shelves = f"an old {room} with {number} dusty shelves and a letter that says {number * 7919 % 1000}. "
        return ToolResult(text=f"Room {number}: {shelves * 5}Nothing else is here. Where next?", ok=True)


HOUSE = dataclasses.replace(
    ENVIRONMENT,
    messages=lambda task: [
        Message(
            role=Role.SYSTEM, content="You explore an old house. Reply with the name of the next room, nothing else."
        ),
        Message(role=Role.USER, content="You stand at the door. Where do you go?"),
        Message(role=Role.ASSISTANT, content="The hall."),
        Message(role=Role.USER, content="The hall is empty. Where next?"),
        Message(role=Role.ASSISTANT, content="The kitchen."),
        Message(role=Role.USER, content="The kitchen is empty too. Where next?"),
    ],
    tools=(Tool(name="go", description="Go to a room.", parameters={"type": "object"}),),
    syntax=EveryTurn(),
    tool_role=Role.USER,
)


class Sampler:
    """The engine, as a harness asks it."""

    def __init__(self, engine):
        self.engine = engine

    async def generate(self, prompt_token_ids, sampling):
        waiting = self.engine.submit(Request(prompt=prompt_token_ids, sampling=sampling))
        return await asyncio.wrap_future(waiting.future)


async def play(engine, chat, attempt):
    harness = Harness(HOUSE, chat)
    session = harness.start(
        Task(id="house", split=Split.TRAIN, input={"door": "front"}),
        sampling=SAMPLING,
        limits=Limits(max_turns=TURNS, max_context_tokens=WINDOW, compaction=COMPACTION),
        seed=SeedKey(run_seed=1, group="house", attempt=attempt),
    )
    while not session.done:
        await harness.step(session, policy=Sampler(engine), world=House())
        session = Session.from_bytes(session.to_bytes())
    return session


@pytest.fixture(scope="module")
def sessions():
    if not MODEL.is_dir():
        pytest.skip("the model is not converted yet: run `make setup`")
    torch.set_num_threads(2)
    chat = ChatTokenizer.load(MODEL)
    limits = SchedulerLimits(max_seqs=ATTEMPTS, max_len=1024)
    engine = Engine.load(MODEL, codec=chat, dtype=EngineDtype.FLOAT32, limits=limits)

    async def everything():
        return await asyncio.gather(*(play(engine, chat, attempt) for attempt in range(ATTEMPTS)))

    try:
        return asyncio.run(everything())
    finally:
        engine.close()


def test_thirty_turns_and_their_summaries_are_one_rollout_and_trained_on(sessions):
    rollouts = [
        TrainRollout(f"r{number}", "house", float(number == 0), session.trajectory)
        for number, session in enumerate(sessions)
    ]
    for session in sessions:
        trajectory = session.trajectory
        trajectory.validate()
        assert session.turn == TURNS
        assert session.compactions >= 3
        assert len(trajectory.segments) == session.compactions + 1
        assert all(len(segment.token_ids) <= WINDOW for segment in trajectory.segments)
        said = [m for m in trajectory.messages if m.role is Role.ASSISTANT and m.segment >= 0]
        assert len(said) == TURNS + session.compactions
        assert sum(m.end - m.start for m in said) == trajectory.sampled_tokens()
        assert sum(len(segment.token_ids) for segment in trajectory.segments) > 4 * WINDOW

    stage = RlStage(
        sampling=SAMPLING,
        max_turns=TURNS,
        max_context_tokens=WINDOW,
        compaction=COMPACTION,
        optimizer=OptimizerSpec(learning_rate=1e-5),
    )
    trainer = Trainer(MODEL, stage=stage, seed=0, dtype=ComputeDtype.FP32)
    before = trainer.weights()
    metrics = trainer.step(rollouts)
    sampled = sum(rollout.trajectory.sampled_tokens() for rollout in rollouts)
    for session in sessions:
        windows = [len(segment.token_ids) for segment in session.trajectory.segments]
        sys.stdout.write(f"\nturns {session.turn}, summaries {session.compactions}, windows {windows}")
    sys.stdout.write(
        f"\ntrained {metrics.trained_tokens} of {sampled}, k3 {metrics.k3_behaviour:.1e}, "
        f"max ratio {metrics.max_ratio:.6f}, grad norm {metrics.grad_norm:.3f}, {metrics.seconds:.0f} s\n"
    )
    assert metrics.trained_tokens == sampled
    assert metrics.untrainable_tokens == 0
    assert (metrics.rollouts, metrics.groups) == (ATTEMPTS, 1)
    assert metrics.advantage_abs_mean == pytest.approx(0.5)
    assert metrics.k3_behaviour < 1e-6
    assert metrics.max_ratio == pytest.approx(1.0, abs=0.02)
    assert metrics.grad_norm > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.weights().items())
