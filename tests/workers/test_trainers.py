"""The train worker with the real trainer process on a tiny model: positions, replays, adopted versions, epochs."""

import os
import random
import signal
import time

import pytest

from controlplane.models import BatchItem, Event, PolicyVersion, Rollout, Run, Stage, Step, WorkUnit
from controlplane.services.steps import BatchEntry, step_begin, step_create
from controlplane.services.work import work_claim
from controlplane.states import EventType, StepState, VersionState, WorkState
from rl_core.errors import TrainerLost
from rl_core.store import open_store
from rl_core.types import Ending, Message, Role, SamplingParams, TokenSegment, Trajectory, VersionSpan
from tests.domain_factories import make_catalog, make_group, make_project, make_run, make_spec
from tests.loop_rig import register, tiny_model
from workers import base
from workers.base import Attempt
from workers.control import materialise
from workers.leases import LeaseKeeper
from workers.train import train_step
from workers.trainers import ResidentTrainer, checkpoint_root

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def run(tmp_path, settings):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    settings.CHECKPOINT_DIR = tmp_path / "checkpoints"
    settings.STATE_DIR = tmp_path / "state"
    base.store.cache_clear()
    project = make_project()
    register(project, tiny_model(tmp_path), settings.STORE_URL)
    make_catalog_without_model(project)
    spec = make_spec(steps=9, checkpoint_every=2, optimizer={"learning_rate": 1e-2})
    yield make_run(project, spec=spec)
    base.store.cache_clear()


@pytest.fixture
def trainer():
    resident = ResidentTrainer()
    yield resident
    resident.close()


def make_catalog_without_model(project) -> None:
    from unittest.mock import patch

    with patch("tests.domain_factories.make_model"):
        make_catalog(project)


def trajectory(run: Run, rng: random.Random) -> bytes:
    """Twelve tokens of prompt, six sampled by the head."""
    head = PolicyVersion.objects.get(pk=run.lineage.head_id)
    ids = [rng.randrange(300) for _ in range(18)]
    segment = TokenSegment(
        token_ids=ids,
        loss_mask=[0] * 12 + [1] * 6,
        logprobs=[0.0] * 12 + [-5.7] * 6,
        spans=[VersionSpan(12, 18, str(head.ref))],
        sampling=SamplingParams(),
    )
    messages = [Message(role=Role.USER, content="?"), Message(role=Role.ASSISTANT, content="!", parent=0, segment=0)]
    return Trajectory(task_id="t", messages=messages, segments=[segment], ending=Ending.TERMINATED).to_bytes()


def batch(run: Run) -> Step:
    """The next step, of two groups with two attempts each."""
    run.lineage.refresh_from_db()
    rng = random.Random(run.steps.count())
    store = open_store(base.store().url)
    entries = []
    for n in range(2):
        group = make_group(run, position=100 * run.steps.count() + n)
        for attempt in range(2):
            key = store.put_blob(trajectory(run, rng))
            rollout = Rollout.objects.create(group=group, attempt=attempt, reward=float(attempt), trajectory_key=key)
            entries.append(
                BatchEntry(group_key=str(group.pk), reward=float(attempt), trajectory_key=key, rollout_id=rollout.pk)
            )
    return step_create(run=run, stage=Stage.objects.get(run=run), entries=entries)


def train(step: Step, trainer: ResidentTrainer) -> PolicyVersion:
    """Claim the step's unit and train it."""
    unit = WorkUnit.objects.get(ref=step.pk)
    claim = work_claim(unit_id=unit.pk, worker="w")
    assert claim is not None
    with LeaseKeeper() as keeper:
        fresh = step_begin(claim)
        assert fresh is not None
        attempt = Attempt(claim, keeper)
        keeper.hold(claim, on_loss=attempt.lose)
        train_step(attempt, fresh, trainer)
    step.refresh_from_db()
    assert step.state == StepState.PUBLISHED
    return step.version


def kill(trainer: ResidentTrainer) -> None:
    os.kill(trainer._process.pid, signal.SIGKILL)
    trainer._process._process.wait()


def test_a_killed_trainer_is_rebuilt_and_adopts_what_was_published(run, trainer, settings, tmp_path):
    versions = [train(batch(run), trainer) for _ in range(3)]
    assert [folder.name[:11] for folder in checkpoint_root(run).iterdir()] == ["step-000002"]
    run.refresh_from_db()
    assert run.checkpoint_step == 2
    kill(trainer)
    versions.append(train(batch(run), trainer))
    assert [version.epoch for version in versions] == [0, 0, 0, 0]
    assert versions[3].parent == versions[2]
    # a second trainer that never died comes to the same weights
    lone = ResidentTrainer()
    try:
        step = run.steps.get(number=4)
        lone.stand_before(step, Attempt(None, None))
        again = lone.take(step, version=versions[3].ref, fence=versions[3].fence)
    finally:
        lone.close()
    assert (again["root"], again["adopted"]) == (versions[3].root, True)
    from rl_core.delta import weights_root
    from rl_core.models.checkpoint import read_checkpoint

    folder = materialise(versions[3], tmp_path / "exported")
    assert weights_root(read_checkpoint(folder)) == versions[3].root


def test_weights_that_come_out_otherwise_open_an_epoch_and_no_number_is_missing(run, trainer, tmp_path):
    old = [train(batch(run), trainer) for _ in range(3)]
    # as on other hardware: step 3, taken again, does not give the published weights
    for item in BatchItem.objects.filter(step__number=3):
        BatchItem.objects.filter(pk=item.pk).update(reward=1.0 - item.reward)
    kill(trainer)
    new = [train(batch(run), trainer) for _ in range(2)]
    assert [(version.epoch, version.number) for version in old + new] == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]
    assert Event.objects.filter(type=EventType.EPOCH_OPENED).count() == 1
    run.lineage.refresh_from_db()
    assert (run.lineage.epoch, run.lineage.head) == (1, new[-1])
    from rl_core.delta import weights_root
    from rl_core.models.checkpoint import read_checkpoint

    for version in (old[2], new[1]):  # both chains lead to what their roots name
        folder = materialise(version, tmp_path / f"exported-{version.epoch}")
        assert weights_root(read_checkpoint(folder)) == version.root
    # and the next crash replays within the new epoch, or opens another, but never stops
    kill(trainer)
    assert train(batch(run), trainer).number == 6


def test_a_torn_checkpoint_is_passed_over(run, trainer):
    for _ in range(5):
        train(batch(run), trainer)
    newest = sorted(checkpoint_root(run).iterdir())[-1]
    state = newest / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    kill(trainer)
    version = train(batch(run), trainer)
    assert (version.epoch, version.number) == (0, 6)


def test_a_refused_attempt_leaves_no_trace_and_its_trainer_is_rebuilt(run, trainer):
    train(batch(run), trainer)
    step = batch(run)
    unit = WorkUnit.objects.get(ref=step.pk)
    old = work_claim(unit_id=unit.pk, worker="slow")
    attempt = Attempt(old, None)
    take = trainer.take

    def late(step, **options):
        answer = take(step, **options)
        WorkUnit.objects.filter(pk=unit.pk).update(state=WorkState.QUEUED, sends=1)  # its lease lapses meanwhile
        attempt.lost.set()
        return answer

    trainer.take = late
    from controlplane.errors import StaleFence

    with pytest.raises(StaleFence):
        train_step(attempt, step_begin(old), trainer)
    trainer.take = take
    step.refresh_from_db()
    assert step.state == StepState.BATCHED
    assert train(step, trainer).number == 2
    assert PolicyVersion.objects.filter(lineage=run.lineage, state=VersionState.COMMITTED).count() == 3
    assert train(batch(run), trainer).number == 3


def test_a_trainer_that_stands_elsewhere_is_lost_not_guessed(run, trainer):
    train(batch(run), trainer)
    step = batch(run)
    with pytest.raises(TrainerLost, match="asked for step 9"):
        trainer.take(Step(number=9, run=run, stage=step.stage), version=step.base_version.ref, fence=99999)


def test_a_long_checkpoint_outlives_the_lease_of_its_step(run, trainer, settings):
    settings.LEASE_S = 0.3
    write = trainer.checkpoint

    def slow(**options):
        time.sleep(1.0)
        return write(**options)

    trainer.checkpoint = slow
    for _ in range(2):
        train(batch(run), trainer)
    run.refresh_from_db()
    assert run.checkpoint_step == 2
