"""A slice of rollouts over the real database, store, harness and tokenizer; the engines are scripted."""

import asyncio
from collections.abc import Callable

import pytest
from django.db import connection

from controlplane.conductor import run_advance
from controlplane.models import Replica, ReplicaSlot, Rollout, RolloutGroup, Run, WorkUnit
from controlplane.services.runs import run_stop
from controlplane.services.work import work_claim
from controlplane.states import AttemptState, GroupPurpose, GroupState, RolloutState, WorkKind, WorkState
from rl_core.chat import ChatTokenizer
from rl_core.environments.word_problems import open_world
from rl_core.errors import EngineBusy, EngineUnreachable, RequestRefused, VersionUnavailable, WorldError
from rl_core.store import open_store
from rl_core.types import FinishReason, Generated, SamplingParams, Trajectory, VersionSpan
from tests.domain_factories import TESTER, make_run
from tests.rl_core.chat_factory import chat_folder
from workers import base, sessions
from workers.leases import LeaseKeeper
from workers.replicas import ReplicaPool
from workers.slices import RolloutSlice

pytestmark = pytest.mark.django_db(transaction=True)


class Engine:
    """Answers a calculator call, then the answer. `trouble` may raise, by call number; `pace_s` makes it slow."""

    def __init__(self, folder, *, trouble: Callable[[int], None] = lambda call: None, pace_s: float = 0.0) -> None:
        self.chat = ChatTokenizer.load(folder)
        self.trouble, self.pace_s = trouble, pace_s
        self.calls: list[dict] = []
        self.played: set[str] = set()
        self.version: str | None = None

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams, **bounds) -> Generated:
        self.calls.append({"sampling": sampling, **bounds})
        self.trouble(len(self.calls))
        await asyncio.sleep(self.pace_s)
        text = "Answer: 2" if bounds["session"] in self.played else "<calc>1+1</calc>"
        self.played.add(bounds["session"])
        ids = self.chat.encode(text)
        return Generated(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            text=text,
            finish_reason=FinishReason.STOP,
            spans=[VersionSpan(0, len(ids), self.version or str(bounds["min_version"] or bounds["exact_version"]))],
            prompt_tokens=len(prompt_token_ids),
        )

    async def aclose(self) -> None:
        """Nothing to close."""


@pytest.fixture
def folder(tmp_path, settings):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    base.store.cache_clear()
    yield chat_folder(tmp_path / "model")
    base.store.cache_clear()


def ready_run(folder, **stage) -> Run:
    """A run whose replicas hold version 0 and whose groups are admitted."""
    run = make_run(**({"max_staleness": 0, "sampling": {"max_tokens": 64}, "max_context_tokens": 4096} | stage))
    type(run.lineage.model).objects.update(folder=str(folder))
    run_advance(run.pk)
    Replica.objects.update(inference_url="http://engine")
    ReplicaSlot.objects.update(current_version=run.lineage.head)
    return run


def roll(run: Run, engine, *, slice_s: float = 120.0, purpose=GroupPurpose.TRAIN, **options) -> None:
    """One slice that starts with the first queued group."""
    group = run.groups.filter(purpose=purpose).order_by("position").first()
    unit = WorkUnit.objects.get(kind=WorkKind.ROLLOUT, ref=group.pk)
    WorkUnit.objects.filter(state=WorkState.QUEUED).update(sends=1)
    claim = work_claim(unit_id=unit.pk, worker="w")
    assert claim is not None
    with LeaseKeeper(**options) as keeper:
        rollout_slice = RolloutSlice(keeper, pool=ReplicaPool(client_of=lambda place: engine), slice_s=slice_s)
        asyncio.run(rollout_slice.run(claim))


def train_groups(run: Run) -> list[RolloutGroup]:
    return list(run.groups.filter(purpose=GroupPurpose.TRAIN).order_by("position"))


def test_all_queued_groups_are_rolled_out_in_one_slice(folder, settings):
    run = ready_run(folder)
    engine = Engine(folder)
    roll(run, engine)
    assert {group.state for group in train_groups(run)} == {GroupState.SCORING}
    assert {group.oldest_version_id for group in train_groups(run)} == {run.lineage.head_id}
    store = open_store(settings.STORE_URL)
    for rollout in Rollout.objects.all():
        assert rollout.state == RolloutState.FINISHED
        trajectory = Trajectory.from_bytes(store.get_blob(rollout.trajectory_key))
        assert trajectory.sampled_tokens() == rollout.sampled_tokens > 0
        assert trajectory.versions() == [str(run.lineage.head.ref)]
        assert rollout.session_key == ""
    assert WorkUnit.objects.filter(kind=WorkKind.SCORE).count() == len(train_groups(run))
    seeds = [call["sampling"].seed for call in engine.calls]
    assert len(set(seeds)) == len(seeds)
    assert {str(call["min_version"]) for call in engine.calls} == {str(run.lineage.head.ref)}


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_an_evaluation_is_sampled_as_asked_and_of_exactly_its_version(folder, temperature):
    run = ready_run(folder, eval_tasks=2, eval_temperature=temperature)
    run_advance(run.pk)
    engine = Engine(folder)
    roll(run, engine, purpose=GroupPurpose.EVALUATION)
    exact = [call for call in engine.calls if call["exact_version"] is not None]
    assert exact
    assert {call["sampling"].temperature for call in exact} == {temperature}
    assert {str(call["exact_version"]) for call in exact} == {str(run.lineage.head.ref)}


def test_a_session_goes_on_from_its_last_turn_in_another_slice(folder):
    run = ready_run(folder)
    engine = Engine(folder, pace_s=2.0)
    roll(run, engine, slice_s=1.5)
    first = train_groups(run)[0]
    half = list(first.rollouts.order_by("attempt"))
    assert first.state == GroupState.RUNNING
    assert {(rollout.state, rollout.turns) for rollout in half} == {(RolloutState.RUNNING, 1)}
    unit = WorkUnit.objects.get(ref=first.pk, kind=WorkKind.ROLLOUT)
    assert (unit.state, unit.failures) == (WorkState.QUEUED, 0)
    assert unit.attempts.get().state == AttemptState.YIELDED
    before = {rollout.pk: rollout.sampled_tokens for rollout in half}
    engine.pace_s = 0.0
    roll(run, engine)
    for rollout in first.rollouts.all():
        assert rollout.state == RolloutState.FINISHED
        assert rollout.turns == 2
        assert rollout.sampled_tokens > before[rollout.pk]


@pytest.mark.parametrize("error", [EngineBusy, VersionUnavailable, EngineUnreachable])
def test_engines_in_trouble_cost_time_and_no_attempt(folder, error):
    run = ready_run(folder)

    def trouble(call: int) -> None:
        if call <= 3:
            raise error("not now")

    roll(run, Engine(folder, trouble=trouble))
    assert {group.state for group in train_groups(run)} == {GroupState.SCORING}
    assert {unit.failures for unit in WorkUnit.objects.filter(kind=WorkKind.ROLLOUT)} == {0}


def test_a_session_that_breaks_fails_its_group_and_starts_again(folder):
    run = ready_run(folder)

    def trouble(call: int) -> None:
        if call == 1:
            raise RequestRefused("too long")

    roll(run, Engine(folder, trouble=trouble), slice_s=5)
    broken = Rollout.objects.get(state=RolloutState.FAILED)
    assert (broken.fault, broken.error) == ("infrastructure", "too long")
    unit = WorkUnit.objects.get(ref=broken.group_id, kind=WorkKind.ROLLOUT)
    assert unit.failures == 1


class Registry:
    """The calculator's world, which writes down what is opened and closed, and fails to close."""

    def __init__(self) -> None:
        self.inner = open_world(None)
        self.opened: list[str] = []
        self.closed: list[tuple[bytes, bool]] = []

    async def open(self, *, task, key: str) -> bytes:
        self.opened.append(key)
        return key.encode()

    async def call(self, **asked):
        return await self.inner.call(**asked)

    async def export(self, *, task, state: bytes) -> dict[str, str]:
        return {"opened_as": state.decode()}

    async def close(self, *, task, state: bytes) -> None:
        rollout_id = state.decode().partition(".")[0]
        stored = await asyncio.to_thread(self._is_finished, rollout_id)
        self.closed.append((state, stored))
        raise WorldError("it is gone already")

    @staticmethod
    def _is_finished(rollout_id: str) -> bool:
        try:
            return Rollout.objects.get(pk=rollout_id).state == RolloutState.FINISHED
        finally:
            connection.close()


def test_a_session_has_a_world_of_its_own_that_is_closed_once_it_is_written_down(folder, settings, monkeypatch):
    world = Registry()
    monkeypatch.setattr(sessions, "world_of", lambda *asked: world)
    run = ready_run(folder)
    roll(run, Engine(folder))
    rollouts = list(Rollout.objects.filter(group__in=train_groups(run)))
    assert len(set(world.opened)) == len(world.opened) == len(rollouts)
    assert {key.partition(".")[0] for key in world.opened} == {str(rollout.pk) for rollout in rollouts}
    assert sorted(world.closed) == sorted((key.encode(), True) for key in world.opened)
    assert {rollout.state for rollout in rollouts} == {RolloutState.FINISHED}
    assert {group.state for group in train_groups(run)} == {GroupState.SCORING}
    assert {unit.failures for unit in WorkUnit.objects.filter(kind=WorkKind.ROLLOUT)} == {0}
    store = open_store(settings.STORE_URL)
    stored = [Trajectory.from_bytes(store.get_blob(rollout.trajectory_key)) for rollout in rollouts]
    assert sorted(trajectory.artifacts["opened_as"] for trajectory in stored) == sorted(world.opened)


def test_an_engine_of_another_run_breaks_the_session(folder):
    run = ready_run(folder)
    engine = Engine(folder)
    engine.version = "another:0-3"
    roll(run, engine, slice_s=5)
    assert {rollout.state for rollout in train_groups(run)[0].rollouts.all()} == {RolloutState.FAILED}
    assert "another run" in Rollout.objects.first().error


def test_a_slice_that_lost_its_lease_writes_nothing_more(folder):
    run = ready_run(folder)

    def trouble(call: int) -> None:
        if call == 1:
            asyncio.get_running_loop().run_in_executor(None, stop)

    def stop() -> None:
        from django.db import connection

        run_stop(run=Run.objects.get(pk=run.pk), actor=TESTER, reason="enough")
        connection.close()

    roll(run, Engine(folder, trouble=trouble, pace_s=3600.0), slice_s=3600.0, lease_s=0.3)  # ends by the loss alone
    assert {group.state for group in train_groups(run)} == {GroupState.DROPPED}
    assert not Rollout.objects.filter(state=RolloutState.FINISHED).exists()
