"""Rollouts that a remote plays: real slices, the real web process, the reference server; scripted engines."""

import asyncio
import contextlib
import itertools
import json

import msgspec
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async

from benchmarks.scripted_engine import Reply, ScriptedEngine
from controlplane.conductor import run_advance
from controlplane.conductor.remotes import sessions_release
from controlplane.errors import StaleFence
from controlplane.models import (
    CriterionScore,
    ModelCard,
    Rollout,
    RolloutCall,
    RolloutGroup,
    RolloutSession,
    Run,
    WorkUnit,
)
from controlplane.selectors.rollout_routes import rollout_route
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.rollout_sessions import rollout_session_end
from controlplane.services.runs import run_stop
from controlplane.services.work import Claim, work_claim
from controlplane.states import GroupState, RolloutState, WorkKind, WorkState
from rl_core.chat import ChatTokenizer
from rl_core.environments.remote.messages import Described, ToolDescription
from rl_core.environments.remote.protocol import Kind
from rl_core.environments.remote.server import RemoteServer, serving
from rl_core.environments.tasks import Task, TaskSet
from rl_core.store import open_store
from rl_core.types import FinishReason, Generated, Split, Trajectory, VersionSpan
from tests.controlplane.gateway.gateway_rig import listening
from tests.domain_factories import TESTER, make_project, make_run, make_tasks
from tests.remote_rows import SECRET, age, hold, make_remote
from tests.rl_core.chat_factory import chat_folder
from tests.rl_core.environments.remote.customers import Asker, Counter
from workers import base, remote_sessions, score
from workers.base import work_on
from workers.leases import LeaseKeeper
from workers.replicas import ReplicaPool
from workers.slices import RolloutSlice

pytestmark = pytest.mark.django_db(transaction=True)

ADD_TWO = '<tool_call>{"name": "add", "arguments": {"n": 2}}</tool_call>'
REPORTED = [{"key": "reported", "text": "as reported", "kind": "reported", "weight": 1.0}]


@pytest.fixture
def folder(tmp_path, settings, monkeypatch):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    settings.REPLICA_TOKEN_DIR = tmp_path
    settings.SANDBOX_SOCKET = tmp_path / "none.sock"
    monkeypatch.setattr(remote_sessions, "LOOK_S", 0.05)
    base.store.cache_clear()
    yield chat_folder(tmp_path / "model")
    base.store.cache_clear()


@pytest_asyncio.fixture(autouse=True)
async def engine(folder):
    chat = ChatTokenizer.load(folder)

    def script(body):
        text = "a yes" if len(one.asked) % 2 else "n"
        return Reply(tokens=chat.encode(text), text=text, finish=FinishReason.STOP)

    one = ScriptedEngine(script)
    async with one.serving():
        yield one


@pytest_asyncio.fixture
async def web(settings):
    async with listening() as address:
        settings.PUBLIC_URL = address
        yield address


@pytest.fixture
def asker():
    return Asker()


@contextlib.contextmanager
def customer(asker, **options):
    with serving(RemoteServer(asker, secret=SECRET, **options)) as url:
        yield url


def world_run(folder, engine, url: str) -> Run:
    """A run in the remote world at `url`."""
    described = Described(kind=Kind.WORLD, tools=[msgspec.convert(tool, ToolDescription) for tool in Counter.tools])
    tasks = TaskSet(
        tuple(
            Task(id=f"{split}-{n}", split=split, input={"prompt": "Count to three.", "n": f"{split}{n}"})
            for split in Split
            for n in range(2)
        )
    )
    return ready_run(folder, engine, url, described=described, tasks=tasks)


def ready_run(folder, engine, url: str, *, tasks: TaskSet | None = None, **remote) -> Run:
    """A run of the remote environment at `url`, its groups admitted."""
    project = make_project()
    make_run(project)  # brings models, clusters and a catalogue
    make_remote(project, url=url, **remote)
    tasks = tasks or make_tasks(train=4, heldout=1)
    task_set_create(project=project, slug="shop", environment="shop", tasks=tasks, actor=TESTER)
    rubric_publish(project=project, slug="shop", criteria=REPORTED, author=None, note="", actor=TESTER)
    ModelCard.objects.filter(project=project).update(folder=str(folder))
    stage = {
        "kind": "rl",
        "environment": "shop",
        "task_set": "shop",
        "rubric": "shop",
        "steps": 1,
        "prompts_per_step": 1,
        "group_size": 2,
        "eval_tasks": 1,
        "sampling": {"max_tokens": 100},
        "max_turns": 5,
        "max_context_tokens": 4096,
    }
    run = make_run(project, spec={"model": "tiny", "seed": 7, "stages": [stage]})
    run_advance(run.pk)
    hold(run, tokens=folder.parent, engine_url=engine.url)
    return run


async def roll(run: Run, *, slice_s: float = 20.0) -> RolloutGroup:
    """One slice of the run's first training group."""

    def claim():
        group = run.groups.filter(purpose="train").order_by("position").first()
        WorkUnit.objects.exclude(ref=group.pk).update(state=WorkState.CANCELLED)
        unit = WorkUnit.objects.get(kind=WorkKind.ROLLOUT, ref=group.pk)
        WorkUnit.objects.filter(pk=unit.pk).update(sends=1)
        return group, work_claim(unit_id=unit.pk, worker="test")

    group, claimed = await sync_to_async(claim)()
    with LeaseKeeper() as keeper:
        await RolloutSlice(keeper, slice_s=slice_s).run(claimed)
    await group.arefresh_from_db()
    return group


async def until(holds) -> None:
    for _ in range(1200):
        if await sync_to_async(holds)():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come about")


async def test_a_group_is_played_elsewhere_and_scored(folder, engine, web, asker, settings):
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        group = await roll(run)
    assert group.state == GroupState.SCORING
    rollouts = [row async for row in group.rollouts.order_by("attempt")]
    assert [(row.state, row.ending, row.turns) for row in rollouts] == [(RolloutState.FINISHED, "terminated", 1)] * 2
    store = open_store(settings.STORE_URL)
    trajectories = [Trajectory.from_bytes(store.get_blob(row.trajectory_key)) for row in rollouts]
    assert sorted(one.reported["reward"] for one in trajectories) == [0.0, 1.0]
    sampled = [sum(sum(segment.loss_mask) for segment in one.segments) for one in trajectories]
    assert sampled == [row.sampled_tokens for row in rollouts]
    assert all(count > 0 for count in sampled)
    assert asker.runs == 2
    sessions = [row async for row in RolloutSession.objects.all()]
    assert [await sync_to_async(rollout_route)(row.digest) for row in sessions] == [None, None]
    unit = await WorkUnit.objects.aget(kind=WorkKind.SCORE, ref=group.pk)
    await WorkUnit.objects.filter(pk=unit.pk).aupdate(sends=1, state=WorkState.QUEUED)
    await sync_to_async(work_on)(unit.pk, score.score)
    rewards = [row.reward async for row in group.rollouts.order_by("attempt")]
    assert rewards == [one.reported["reward"] for one in trajectories]
    assert await CriterionScore.objects.filter(criterion="reported", reason="as reported").acount() == 2


async def test_a_session_outlives_its_slice_and_is_taken_up_again(folder, engine, web, asker):
    asker.gate.clear()
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        group = await roll(run, slice_s=0.5)
        assert group.state == GroupState.RUNNING
        assert await Rollout.objects.filter(group=group, state=RolloutState.RUNNING).acount() == 2
        asker.gate.set()
        group = await roll(run)
    assert group.state == GroupState.SCORING
    assert asker.runs == 2
    assert await RolloutSession.objects.acount() == 2


async def test_a_result_that_came_between_two_slices_is_taken_in(folder, engine, web, asker):
    asker.gate.clear()
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        await roll(run, slice_s=0.5)
        asker.gate.set()
        await until(lambda: RolloutSession.objects.filter(result__isnull=False).count() == 2)
        group = await roll(run, slice_s=0.5)
    assert group.state == GroupState.SCORING
    assert asker.runs == 2


async def test_an_environment_that_is_full_holds_the_rest_back(folder, engine, web, asker, monkeypatch):
    monkeypatch.setattr(remote_sessions, "PATIENCE_S", 0.1)
    asker.gate.clear()
    with customer(asker, max_running=1) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        group = await roll(run, slice_s=0.5)
        assert group.state == GroupState.RUNNING
        assert await RolloutSession.objects.filter(accepted_at__isnull=True).acount() == 1
        assert await Rollout.objects.filter(group=group, state=RolloutState.RUNNING).acount() == 2
        asker.gate.set()
        group = await roll(run)
    assert group.state == GroupState.SCORING
    assert asker.runs == 2
    assert (await WorkUnit.objects.aget(kind=WorkKind.ROLLOUT, ref=group.pk)).failures == 0


async def test_an_environment_that_stays_full_is_the_infrastructures_fault(folder, engine, web, asker, monkeypatch):
    monkeypatch.setattr(remote_sessions, "PATIENCE_S", 0.1)
    with customer(asker, max_running=0) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        await roll(run, slice_s=0.3)
        for session in [row async for row in RolloutSession.objects.all()]:
            await sync_to_async(age)(session, seconds=601)
        group = await roll(run)
    failed = [row async for row in group.rollouts.all()]
    assert {(row.state, row.fault) for row in failed} == {(RolloutState.FAILED, "infrastructure")}
    assert all("asks for patience" in row.error for row in failed)
    assert asker.runs == 0


async def test_a_lost_callback_is_asked_for(folder, engine, web, asker, monkeypatch):
    monkeypatch.setattr(remote_sessions, "ASK_S", 0.2)
    monkeypatch.setattr(RemoteServer, "send", lambda self, url, message: 204)  # it never left
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        group = await roll(run)
    assert group.state == GroupState.SCORING
    assert await RolloutSession.objects.filter(result__isnull=False).acount() == 2


async def test_a_result_that_came_while_nobody_looked_counts_however_late(folder, engine, web, asker, monkeypatch):
    monkeypatch.setattr(RemoteServer, "send", lambda self, url, message: 204)  # the web process was down
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        await roll(run, slice_s=1.0)
        sessions = [row async for row in RolloutSession.objects.all()]
        assert all(row.accepted_at and row.result is None for row in sessions)
        for session in sessions:
            await sync_to_async(age)(session, seconds=601)
        group = await roll(run)
    assert group.state == GroupState.SCORING


async def test_a_worker_that_lost_its_claim_ends_no_session(folder, engine, web, asker):
    asker.gate.clear()
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        await roll(run, slice_s=0.5)
        session = await RolloutSession.objects.select_related("rollout__group").afirst()
        unit = await WorkUnit.objects.aget(kind=WorkKind.ROLLOUT, ref=session.rollout.group.pk)
        lost = Claim(unit.pk, WorkKind.ROLLOUT, unit.ref, run.pk, run.project_id, unit.fence - 1)
        with pytest.raises(StaleFence):
            await sync_to_async(rollout_session_end)(session_id=session.pk, reason="it hangs", claim=lost)
        await session.arefresh_from_db()
        assert (session.ended_at, session.reason) == (None, "")


async def test_a_session_that_outlives_its_time_is_the_environments_fault(folder, engine, web, asker):
    asker.gate.clear()
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        await roll(run, slice_s=0.5)
        for session in [row async for row in RolloutSession.objects.all()]:
            await sync_to_async(age)(session, seconds=601)
        group = await roll(run)
        await until(lambda: asker.cancelled == 2)
    failed = [row async for row in group.rollouts.all()]
    assert {row.fault for row in failed} == {"environment"}
    assert all("longer than the 600 s" in row.error for row in failed)
    sessions = [row async for row in RolloutSession.objects.all()]
    assert all(row.ended_at and row.reason.startswith("remote_ended") and row.result is None for row in sessions)


async def test_sessions_of_a_run_that_is_stopped_are_cancelled(folder, engine, web, asker):
    asker.gate.clear()
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        await roll(run, slice_s=0.5)
        await sync_to_async(sessions_release)()
        assert not await RolloutSession.objects.exclude(reason="").aexists()  # they are wanted
        await sync_to_async(run_stop)(run=await Run.objects.aget(pk=run.pk), actor=TESTER, reason="enough")
        digests = [row.digest async for row in RolloutSession.objects.all()]
        assert [await sync_to_async(rollout_route)(digest) for digest in digests] == [None, None]
        await sync_to_async(sessions_release)()
        await until(lambda: asker.cancelled == 2)
    reasons = {row.reason async for row in RolloutSession.objects.filter(ended_at__isnull=False)}
    assert reasons == {"its rollout is no longer wanted"}


async def test_a_failed_rollout_begins_again_under_another_key(folder, engine, web, asker):
    fine = asker.run
    asker.run = lambda session: {"error": {"fault": "infrastructure", "message": "the disk is full"}}
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        group = await roll(run)
        failed = [row async for row in group.rollouts.all()]
        assert {(row.state, row.fault) for row in failed} == {(RolloutState.FAILED, "infrastructure")}
        assert all("the disk is full" in row.error for row in failed)
        asker.run = fine
        group = await roll(run)
    assert group.state == GroupState.SCORING
    digests = {row.digest async for row in RolloutSession.objects.all()}
    assert len(digests) == 4


def raising(session):
    raise RuntimeError("a bug")


FAULTS = {
    "its code raises": (raising, "environment", "RuntimeError: a bug"),
    "it says so": (lambda _: {"error": {"fault": "environment", "message": "no stock"}}, "environment", "no stock"),
    "it rewards without asking": (lambda _: {"reward": 1.0}, "environment", "without having asked"),
    "its reward is none": (lambda _: {"reward": 7}, "environment", "in [0, 1]"),
}


@pytest.mark.parametrize(("play", "fault", "error"), FAULTS.values(), ids=FAULTS)
async def test_faults_of_the_environment(folder, engine, web, asker, monkeypatch, play, fault, error):
    monkeypatch.setattr(remote_sessions, "ASK_S", 0.2)
    asker.run = play
    with customer(asker) as url:
        run = await sync_to_async(ready_run)(folder, engine, url)
        group = await roll(run)
    failed = [row async for row in group.rollouts.all()]
    assert {(row.state, row.fault) for row in failed} == {(RolloutState.FAILED, fault)}
    assert all(error in row.error for row in failed)
    assert not await RolloutCall.objects.aexists()


async def test_a_remote_world_is_played_by_our_harness(folder, engine, settings):
    counter = Counter()
    calls = itertools.cycle(['<tool_call>{"name": "add", "arguments": {"n": 1}}</tool_call>'] * 2 + [ADD_TWO])

    class Policy:
        """Adds one, one, and two: the second of the two attempts begins in a world of its own."""

        async def generate(self, prompt_token_ids, sampling, **bounds):
            text = next(calls)
            ids = chat.encode(text)
            spans = [VersionSpan(0, len(ids), str(bounds["min_version"]))]
            return Generated(
                token_ids=ids,
                logprobs=[-0.5] * len(ids),
                text=text,
                finish_reason=FinishReason.STOP,
                spans=spans,
                prompt_tokens=1,
            )

        async def aclose(self):
            """Nothing to close."""

    chat = ChatTokenizer.load(folder)
    with customer(counter) as url:
        run = await sync_to_async(world_run)(folder, engine, url)

        def claim():
            group = run.groups.filter(purpose="train").order_by("position").first()
            unit = WorkUnit.objects.get(kind=WorkKind.ROLLOUT, ref=group.pk)
            WorkUnit.objects.exclude(pk=unit.pk).update(state=WorkState.CANCELLED)
            WorkUnit.objects.filter(pk=unit.pk).update(sends=1)
            return group, work_claim(unit_id=unit.pk, worker="test")

        group, claimed = await sync_to_async(claim)()
        with LeaseKeeper() as keeper:
            pool = ReplicaPool(client_of=lambda place: Policy())
            await RolloutSlice(keeper, slice_s=20.0, pool=pool).run(claimed)
    rollouts = [row async for row in Rollout.objects.filter(group=group)]
    assert {row.state for row in rollouts} == {RolloutState.FINISHED}, [row.error for row in rollouts]
    store = open_store(settings.STORE_URL)
    for row in rollouts:
        trajectory = Trajectory.from_bytes(store.get_blob(row.trajectory_key))
        total = sum(json.loads(call.arguments)["n"] for call in trajectory.tool_calls)
        assert trajectory.tool_calls[-1].result == str(total) == trajectory.artifacts["total"]
        assert total >= 3
        assert row.ending == "terminated"
        assert "<tools>" in trajectory.messages[0].content
        assert trajectory.messages[1].content == "Count to three."
    assert counter.acts == sum(row.turns for row in rollouts)
    assert counter.closed == 2


async def test_an_environment_that_is_not_there_is_the_infrastructures_fault(folder, engine, web):
    run = await sync_to_async(ready_run)(folder, engine, "http://127.0.0.1:9/")
    group = await roll(run)
    failed = [row async for row in group.rollouts.all()]
    assert {(row.state, row.fault) for row in failed} == {(RolloutState.FAILED, "infrastructure")}
