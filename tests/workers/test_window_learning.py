"""A lane's window from rows to weights: feedback, the batch, the trainer process, the published version."""

import random
import uuid

import pytest
import torch

from controlplane.conductor import run_advance
from controlplane.models import BatchItem, WorkUnit
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.feedback import feedback_receive
from controlplane.services.fleet import cluster_create
from controlplane.services.generations import Answer, generation_record
from controlplane.services.lanes import lane_create
from controlplane.services.signals import signal_define, signal_map_publish
from controlplane.services.windows import lane_train
from controlplane.states import Consent, RunState, SignalType, WorkKind
from rl_core.models.packing import TrainSequence, build_packs
from rl_core.store import open_store
from rl_core.types import ClusterRole, FinishReason, Generated, Objective, SamplingParams, VersionSpan
from tests.domain_factories import CRITERIA, TESTER, make_project, make_tasks
from tests.lane_rows import thumbs
from tests.loop_rig import register, tiny_model
from tests.rl_core.models.tiny_models import make_transformer
from workers import base, train
from workers.base import work_on
from workers.control import materialise

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def folder(tmp_path, settings):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    settings.CHECKPOINT_DIR = tmp_path / "checkpoints"
    settings.STATE_DIR = tmp_path / "state"
    base.store.cache_clear()
    yield tiny_model(tmp_path)
    train._resident.close()
    base.store.cache_clear()


@pytest.fixture
def lane(folder, settings):
    project = make_project()
    model = register(project, folder, settings.STORE_URL)
    task_set_create(
        project=project, slug="word-problems", environment="word-problems", tasks=make_tasks(), actor=TESTER
    )
    rubric_publish(project=project, slug="word-problems", criteria=CRITERIA, author=None, note="", actor=TESTER)
    cluster = cluster_create(
        project=project, slug="serving", role=ClusterRole.SERVING, region="here", capacity=8, actor=TESTER, model=model
    )
    signal_define(project=project, slug="thumbs", value_type=SignalType.BOOLEAN)
    content = {"signals": {"thumbs": {"values": {"true": 1.0, "false": 0.0}}}}
    signal_map_publish(project=project, content=content, author=None, actor=TESTER)
    return lane_create(project=project, slug="assistant", cluster=cluster, model=model, actor=TESTER)


def make_answers(count=48):
    """Prompts and answers of random tokens; one is liked when its first token is even."""
    rng = random.Random(7)
    return [([rng.randrange(300) for _ in range(12)], [rng.randrange(300) for _ in range(6)]) for _ in range(count)]


def logprobs_under(folder, answers):
    """Logprob of each answer's tokens under the folder's weights."""
    sequences = [TrainSequence([*prompt, *own], [0] * len(prompt) + [1] * len(own)) for prompt, own in answers]
    tables = [[0.0] * len(sequence.token_ids) for sequence in sequences]
    model = make_transformer(folder, trainable=False)
    for pack in build_packs(sequences, token_budget=1000):
        logprobs = model.forward(pack, train=False).logprobs.tolist()
        for owner, index, logprob in zip(pack.owner.tolist(), pack.index.tolist(), logprobs, strict=True):
            tables[owner][index] = logprob
    return [table[len(prompt) :] for table, (prompt, _) in zip(tables, answers, strict=True)]


def record(lane, settings, answers, logprobs, *, sampling, user):
    store = open_store(settings.STORE_URL)
    rows = []
    for number, ((prompt, own), own_logprobs) in enumerate(zip(answers, logprobs, strict=True)):
        span = [VersionSpan(0, len(own), str(lane.promoted_version.ref))]
        generated = Generated(
            token_ids=own,
            logprobs=own_logprobs,
            text="…",
            finish_reason=FinishReason.STOP,
            spans=span,
            prompt_tokens=len(prompt),
        )
        answer = Answer(
            generation_id=uuid.uuid4(),
            messages=[{"role": "user", "content": f"Question {number}"}],
            prompt_token_ids=prompt,
            generated=generated,
            sampling=sampling,
            latency_ms=1.0,
        )
        rows.append(
            generation_record(
                lane=lane,
                version=lane.promoted_version,
                answer=answer,
                user_key=f"{user}-{number % 12}",
                session="",
                consent=Consent.TRAIN,
                store=store,
            )
        )
    return rows


def say(lane, generation, *, value, **changes):
    body = thumbs(generation.id, value=value, actor={"hash": str(generation.id)[-12:], "kind": "user"}, **changes)
    feedback_receive(project=lane.project, sender="app", source=None, data=body, actor=TESTER)


def train_window(lane, **overrides):
    stage = {"minimum_answers": 4, "optimizer": {"learning_rate": 1e-3}, **overrides}
    run = lane_train(lane=lane, name="window", actor=TESTER, user=None, overrides=stage)
    for _ in range(2):
        run_advance(run.pk)
    work_on(WorkUnit.objects.get(run=run, kind=WorkKind.TRAIN).pk, train.train)
    for _ in range(2):
        run_advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.COMPLETED, (run.state_reason, WorkUnit.objects.get(run=run).error)
    return run


def gap(logprobs, answers):
    """By how much answers with an even first token are likelier than the others."""
    sums = [sum(own) for own in logprobs]
    even = [value for value, (_, own) in zip(sums, answers, strict=True) if own[0] % 2 == 0]
    odd = [value for value, (_, own) in zip(sums, answers, strict=True) if own[0] % 2]
    return sum(even) / len(even) - sum(odd) / len(odd)


@pytest.mark.parametrize("invert", [False, True])
def test_a_window_moves_what_users_like(lane, folder, settings, tmp_path, invert):
    torch.set_num_threads(1)
    answers = make_answers()
    before = logprobs_under(folder, answers)
    rows = record(lane, settings, answers, before, sampling=SamplingParams(max_tokens=6), user="u")
    for row, (_, own) in zip(rows, answers, strict=True):
        say(lane, row, value=(own[0] % 2 == 0) != invert)
    run = train_window(lane)
    step = run.steps.get()
    assert step.metrics["k3_behaviour"] < 1e-2
    assert step.metrics["optimizer_steps"] == 2
    after = logprobs_under(materialise(run.lineage.head, tmp_path / "after"), answers)
    moved = gap(after, answers) - gap(before, answers)
    assert (moved < -0.05) if invert else (moved > 0.05)


def test_greedy_answers_and_demonstrations_are_trained_by_their_own_losses(lane, folder, settings, tmp_path):
    torch.set_num_threads(1)
    answers = make_answers(12)
    before = logprobs_under(folder, answers)
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    rows = record(lane, settings, answers, before, sampling=greedy, user="u")
    for row in rows[:6]:
        say(lane, row, value=False, demonstration="the pens are blue")
    for number, row in enumerate(rows[6:]):
        say(lane, row, value=number % 2 == 0)
    run = train_window(lane, optimizer_steps=3)
    step = run.steps.get()
    assert set(BatchItem.objects.filter(step=step).values_list("objective", flat=True)) == {
        Objective.KTO,
        Objective.DPO,
    }
    assert step.window["objectives"] == {"dpo": 6, "kto": 6}
    assert (step.metrics["preference_rollouts"], step.metrics["trained_tokens"]) == (12, 0)
    after = logprobs_under(materialise(run.lineage.head, tmp_path / "after"), answers)
    moved = [sum(new) - sum(old) for new, old in zip(after, before, strict=True)]
    liked, disliked, rejected = moved[6::2], moved[7::2], moved[:6]
    assert sum(liked) / 3 > sum(disliked) / 3
    assert sum(liked) / 3 > sum(rejected) / 6
