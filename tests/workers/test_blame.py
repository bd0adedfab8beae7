"""Faults that are not the policy's change nothing that is learned: same tasks, same tokens, same advantages."""

import asyncio
import hashlib
import random
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec
import pytest
from django.db.models import Sum

from controlplane.conductor import run_advance
from controlplane.conductor.fleet import slots_reconcile
from controlplane.models import BatchItem, Rollout, RolloutGroup, RolloutWatch, Run, TaskTally, WorkUnit
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.runs import run_create
from controlplane.states import GroupState, RunState, WorkKind, WorkState
from rl_core.chat import ChatTokenizer
from rl_core.environments.criteria import CRITERIA, CriterionKind, CriterionType
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.tasks import Task
from rl_core.environments.tasks import TaskSet as TaskList
from rl_core.errors import EnvironmentFault, WorldError
from rl_core.store import open_store
from rl_core.trainer.advantages import compute_advantages
from rl_core.types import FinishReason, Generated, SamplingParams, Split, Trajectory, VersionSpan
from tests.domain_factories import TESTER, make_cluster, make_model, make_project, make_spec
from tests.rl_core.chat_factory import chat_folder
from tests.simulated_workers import claim_of, due, train, transfer
from workers import base, score, sessions
from workers.base import work_on
from workers.leases import LeaseKeeper
from workers.replicas import ReplicaPool
from workers.slices import RolloutSlice

pytestmark = pytest.mark.django_db(transaction=True)
FAULTY = 0.2
KINDS = (WorldError, EnvironmentFault)
PLACES = ("open", "call", "grade")


def coin(*parts: object) -> random.Random:
    """Luck that depends on the parts alone."""
    return random.Random(hashlib.sha256("/".join(map(str, parts)).encode()).digest())


class ScriptedPolicy:
    """What it says follows from the seed and the turn. It also fails by itself: malformed calls, cut answers."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self.chat = chat

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams, **bounds) -> Generated:
        luck = coin(sampling.seed)
        choices = [
            *["<calc>1+1</calc>", "<calc>2*3</calc>"] * 3,
            "<calc>2**</calc>",
            "<calc>",
            "Answer: 2",
            "Answer: 6",
            "so",
        ]
        text = luck.choice(choices)
        ids = self.chat.encode(text)
        return Generated(
            token_ids=ids,
            logprobs=[-luck.random() for _ in ids],
            text=text,
            finish_reason=luck.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]),
            spans=[VersionSpan(0, len(ids), str(bounds["min_version"] or bounds["exact_version"]))],
            prompt_tokens=len(prompt_token_ids),
        )

    async def aclose(self) -> None:
        """Nothing to close."""


@dataclass
class Faults:
    """Which rollouts break, where, how, and how often: by task and by how many rollouts of it came before.

    `stubborn` ones break more often than a group is tried, so that groups are voided.
    """

    share: float
    hits: Counter = field(default_factory=Counter)
    broke: Counter = field(default_factory=Counter)

    def strike(self, place: str, rollout: Rollout) -> None:
        name = (rollout.group.draw, rollout.attempt)
        luck = coin("fault", *name)
        faulty, mine, kind = luck.random() < self.share, luck.choice(PLACES), luck.choice(KINDS)
        times = luck.choice([1, 3, 6])
        if faulty and place == mine and self.broke[name] < times:
            self.broke[name] += 1
            self.hits[place, kind] += 1
            raise kind(f"injected while {place}")


@dataclass
class FaultyWorld:
    """The calculator's world, whose machines and whose own code break."""

    inner: object
    faults: Faults

    async def open(self, *, task, key):
        await self._strike("open", key)
        return key.encode()

    async def call(self, *, task, tool, arguments, state, step):
        await self._strike("call", state.decode())
        return await self.inner.call(task=task, tool=tool, arguments=arguments, state=b"", step=step)

    async def export(self, *, task, state):
        return {}

    async def close(self, *, task, state):
        """Nothing is held."""

    async def _strike(self, place: str, key: str) -> None:
        rollout = await asyncio.to_thread(find_rollout, key.split(".")[0])
        if rollout.group.evaluation_id is None:
            self.faults.strike(place, rollout)


def find_rollout(pk: str) -> Rollout:
    from django.db import connection

    try:
        return Rollout.objects.select_related("group").get(pk=pk)
    finally:
        connection.close()


@pytest.fixture
def folder(tmp_path, settings, monkeypatch):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    base.store.cache_clear()
    monkeypatch.setattr(sessions, "_BACKOFF_S", 0.001)
    yield chat_folder(tmp_path / "model")
    base.store.cache_clear()


def consumed(folder, monkeypatch, settings, *, share: float, order: int) -> tuple[list, Faults, Run]:
    """Run to its end; what each step was trained on: task, attempt, tokens, reward, advantage."""
    faults = Faults(share)
    plain = ENVIRONMENTS["word-problems"].open_world(None)
    monkeypatch.setattr(sessions, "world_of", lambda *_: FaultyWorld(plain, faults))
    break_graders(monkeypatch, faults)
    run = make_seeded_run(folder)
    policy, workers = ScriptedPolicy(ChatTokenizer.load(folder)), random.Random(order)
    for _ in range(400):
        run_advance(run.pk)
        slots_reconcile()
        run.refresh_from_db()
        if run.finished_at is not None:
            break
        work_once(run, policy, workers)
    assert run.state == RunState.COMPLETED, run.state_reason
    store = open_store(settings.STORE_URL)
    return [trained_on(store, step) for step in run.steps.order_by("number")], faults, run


def trained_on(store, step) -> list[tuple]:
    items = list(BatchItem.objects.filter(step=step).order_by("position").select_related("rollout__group__task"))
    kind = step.run.spec["stages"][0]["loss"]["advantage"]
    advantages = compute_advantages(kind, [item.reward for item in items], [item.group_key for item in items])
    rows = []
    for item, advantage in zip(items, advantages.tolist(), strict=True):
        segments = Trajectory.from_bytes(store.get_blob(item.trajectory_key)).segments
        tokens = [(segment.token_ids, segment.logprobs) for segment in segments]
        rows.append((item.rollout.group.task.key, item.rollout.attempt, tokens, item.reward, advantage))
    return rows


GRADED: ContextVar[Rollout] = ContextVar("GRADED")


def break_graders(monkeypatch, faults: Faults) -> None:
    row, grade_one = CRITERIA[CriterionKind.TOOL_RAN], score._grade_one

    async def grade(graded, params):
        if GRADED.get().group.evaluation_id is None:
            faults.strike("grade", GRADED.get())
        return await row.grade(graded, params)

    async def one(rubric, task, rollout, *more):
        GRADED.set(rollout)
        return await grade_one(rubric, task, rollout, *more)

    monkeypatch.setitem(CRITERIA, CriterionKind.TOOL_RAN, CriterionType(row.params, grade))
    monkeypatch.setattr(score, "_grade_one", one)


def make_seeded_run(folder) -> Run:
    project = make_project()
    make_model(project, folder=str(folder))
    tasks = [
        Task(
            id=f"{split.value}-{n}",
            split=split,
            input={"question": f"{split.value} {n}"},
            reference={"answer": "2" if n % 2 else "6", "expression": "1+1" if n % 2 else "2*3"},
        )
        for split, count in ((Split.TRAIN, 12), (Split.HELDOUT, 2))
        for n in range(count)
    ]
    environment = ENVIRONMENTS["word-problems"]
    task_set_create(
        project=project,
        slug="word-problems",
        environment="word-problems",
        tasks=TaskList(tuple(tasks)),
        actor=TESTER,
    )
    criteria = msgspec.to_builtins(environment.rubric.criteria)
    rubric_publish(project=project, slug="word-problems", criteria=criteria, author=None, note="", actor=TESTER)
    for name in ("east", "west"):
        make_cluster(project, slug=name, capacity=16)
    stage = {"max_staleness": 0, "prompts_per_step": 3, "group_size": 6, "steps": 5, "eval_tasks": 2, "max_turns": 3}
    spec = make_spec(**stage, sampling={"max_tokens": 64}, max_context_tokens=4096)
    return run_create(project=project, name="blame", spec=spec, actor=TESTER)


def work_once(run: Run, policy: ScriptedPolicy, workers: random.Random) -> None:
    """Every queued unit once, in no order that matters; no backoff is waited for."""
    units = list(WorkUnit.objects.filter(project=run.project, state=WorkState.QUEUED).order_by("pk"))
    workers.shuffle(units)
    units.sort(key=lambda unit: unit.kind != WorkKind.TRANSFER)  # without its version a rollout waits
    for unit in units:
        due(unit)
        if unit.kind == WorkKind.ROLLOUT:
            roll_out(unit, policy)
        elif unit.kind == WorkKind.SCORE:
            work_on(unit.pk, score.score)
        elif (claim := claim_of(unit)) is not None:
            {WorkKind.TRANSFER: transfer, WorkKind.TRAIN: train}[unit.kind](claim)


def roll_out(unit: WorkUnit, policy: ScriptedPolicy) -> None:
    claim = claim_of(unit)
    if claim is None:
        return  # an earlier slice took it along
    with LeaseKeeper() as keeper:
        pool = ReplicaPool(client_of=lambda place: policy)
        asyncio.run(RolloutSlice(keeper, pool=pool, slice_s=30.0).run(claim))


def test_faults_in_a_fifth_of_the_rollouts_leave_what_is_learned_as_it_was(folder, monkeypatch, settings):
    with monkeypatch.context() as patch:
        undisturbed, none, _ = consumed(folder, patch, settings, share=0.0, order=1)
    with monkeypatch.context() as patch:
        disturbed, faults, run = consumed(folder, patch, settings, share=FAULTY, order=2)
    assert disturbed == undisturbed
    assert not none.hits
    assert set(faults.hits) == {(place, kind) for place in PLACES for kind in KINDS}, "every kind struck everywhere"
    rollouts = Rollout.objects.filter(group__run=run, group__state=GroupState.CONSUMED)
    assert 0.1 < len(faults.broke) / rollouts.count() < 0.3
    voided = RolloutGroup.objects.filter(run=run, state=GroupState.VOIDED)
    assert voided.exists(), "some groups were lost whole"
    assert all("injected while" in reason for reason in voided.values_list("reason", flat=True))
    scored = Rollout.objects.filter(group__run=run, reward__isnull=False, group__evaluation__isnull=True)
    tallied = TaskTally.objects.filter(version__lineage=run.lineage, task__split=Split.TRAIN.value)
    assert tallied.aggregate(n=Sum("attempts"))["n"] == scored.count(), "each graded attempt counts once"
    assert RolloutWatch.objects.filter(rollout__in=scored).count() == scored.count()
    advantages = [row[-1] for step in undisturbed for row in step]
    assert len({round(advantage, 6) for advantage in advantages}) > 5, "there is something to learn"
