"""The population at the real doors: OpenAI's client against the gateway, signed webhooks against the intake."""

import asyncio
import time
from dataclasses import replace

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings

from controlplane.models import Feedback, FeedbackSource, Generation
from controlplane.processes.errors import DemoFault
from controlplane.processes.lane_demo import population, truth
from controlplane.processes.lane_demo.judgement import read, satisfied
from controlplane.processes.lane_demo.population import FLOOD, FORGERIES, Person, Temper, people
from controlplane.processes.lane_demo.traffic import Crowd, Doors
from controlplane.processes.lane_demo.truth import REPLIES_A_QUESTION, _sample
from controlplane.services.generations import user_hash
from controlplane.services.signals import signal_define
from controlplane.services.sources import source_create
from controlplane.states import Consent, SignalType
from rl_core.environments import short_replies
from rl_core.store import open_store
from rl_core.types import Split, Trajectory
from tests.lane_rows import ACTOR

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]

QUESTIONS = ["What do bees make?", "Where is the Great Wall?"]


@pytest.fixture
def doors(world, served, monkeypatch):
    """The doors of a lane that is served, and a population that reacts at once."""
    for name in ("SHORTEST_DELAY_S", "MEAN_DELAY_S", "LONGEST_DELAY_S"):
        monkeypatch.setattr(population, name, 0.01)
    signal_define(project=world.project, slug="dissatisfied_followup", value_type=SignalType.BOOLEAN)
    _, secret = source_create(project=world.project, slug="demo-app", actor=ACTOR)
    return Doors(url=served, lane=world.lane.slug, gateway_key=world.key(), source="demo-app", source_secret=secret)


async def over(crowd: Crowd, *, timeout_s: float = 120.0) -> None:
    """Until every visit is over."""
    deadline = time.monotonic() + timeout_s
    while crowd.under_way:
        assert time.monotonic() < deadline, f"{crowd.under_way} visits are not over"
        await asyncio.sleep(0.05)


def somebody(temper: Temper) -> Person:
    return next(person for person in people(0) if person.temper is temper)


async def test_people_are_answered_and_what_they_send_is_joined(doors, world):
    honest = [person for person in people(0) if person.temper is Temper.HONEST]
    with Crowd(doors=doors, people=honest, questions=QUESTIONS, seed=1) as crowd:
        crowd.ask(40)
        await over(crowd)
    tally = crowd.tally
    generations = [row async for row in Generation.objects.filter(lane=world.lane)]
    assert tally.replies == len(generations) == 40
    assert {row.consent for row in generations} == {Consent.TRAIN}
    assert all(row.user_hash and row.session and row.trainable for row in generations)
    assert {row.sampled_tokens for row in generations} == {short_replies.MAX_TOKENS}
    version = str(await sync_to_async(world.version)())
    # Among answers at random one may by chance be a sentence: nearly always none is, and then nobody is satisfied.
    by_hash = {user_hash(lane=world.lane, user_key=person.key): person for person in honest}
    store = open_store(settings.STORE_URL)
    readings = []
    for row in generations:
        last = Trajectory.from_bytes(await sync_to_async(store.get_blob)(row.content_key)).messages[-1]
        readings.append((by_hash[row.user_hash].persona, read(last.content)))
    satisfying = sum(satisfied(persona, reading) for persona, reading in readings)
    assert (tally.read[version], tally.satisfying[version]) == (40, satisfying)
    feedback = [row async for row in Feedback.objects.select_related("signal")]
    assert len(feedback) == tally.sent(Temper.HONEST) == tally.accepted(Temper.HONEST)
    assert {row.state for row in feedback} == {"joined"}
    thumbs = [row.value for row in feedback if row.signal.slug == "thumbs"]
    assert len(thumbs) == 40 - tally.silent
    sentences = sum(reading.complete for _, reading in readings)
    assert abs(sum(thumbs) - tally.slips) <= sentences, "only a slip likes what satisfies nobody"


async def test_a_forger_gets_nothing_in_and_a_flooder_many_voices_of_one(doors):
    with Crowd(doors=doors, people=[somebody(Temper.FORGER)], questions=QUESTIONS, seed=1) as crowd:
        crowd.ask(3)
        await over(crowd)
    assert crowd.tally.statuses[Temper.FORGER] == {401: 3 * FORGERIES}
    assert not await Feedback.objects.aexists()
    assert (await FeedbackSource.objects.aget(slug="demo-app")).unauthenticated_count == 3 * FORGERIES
    with Crowd(doors=doors, people=[somebody(Temper.FLOODER)], questions=QUESTIONS, seed=1) as crowd:
        crowd.ask(1)
        await over(crowd)
    assert crowd.tally.sent(Temper.FLOODER) == FLOOD
    assert crowd.tally.accepted(Temper.FLOODER) == await Feedback.objects.acount()
    assert {row.actor_hash async for row in Feedback.objects.all()} == {(await Feedback.objects.afirst()).actor_hash}


async def test_refused_honest_feedback_is_a_fault_and_not_a_quiet_loss(doors):
    wrong = replace(doors, source="nobody")
    with Crowd(doors=wrong, people=people(0)[:80], questions=QUESTIONS, seed=1) as crowd:
        crowd.ask(8)
        with pytest.raises(DemoFault, match=r"honest feedback was refused: 404"):
            await over(crowd)


async def test_a_measurement_is_outside_every_experiment_and_window(doors, world):
    tasks = short_replies.build_task_set().split(Split.HELDOUT)[:5]
    version = str(await sync_to_async(world.version)())
    first, second = [await _sample(doors, version, tasks, 7, lambda text: None) for _ in range(2)]
    assert set(first.replies) == {task.id for task in tasks}
    assert {len(texts) for texts in first.replies.values()} == {REPLIES_A_QUESTION}
    assert first.replies == second.replies, "the same seeds give the same replies"
    rows = [row async for row in Generation.objects.all()]
    assert {(row.user_hash, row.consent, row.content_key) for row in rows} == {("", "none", "")}


async def test_a_measurement_of_another_version_than_answers_is_a_fault(doors, monkeypatch):
    monkeypatch.setattr(truth, "PAUSE_S", 0.0)
    tasks = short_replies.build_task_set().split(Split.HELDOUT)[:1]
    with pytest.raises(DemoFault, match="not with the promoted nobody:0-9"):
        await _sample(doors, "nobody:0-9", tasks, 7, lambda text: None)
