"""A user's word that what they left is not to be used: told where it was, used no more, gone in time."""

from __future__ import annotations

import pytest
from django.utils import timezone

from controlplane.errors import Invalid
from controlplane.models import BatchItem, Event, Feedback, Generation, PolicyVersion, Run, Stage, Step
from controlplane.services.consents import consent_withdraw, content_release
from controlplane.services.feedback import feedback_receive
from controlplane.services.generations import user_hash
from controlplane.services.retractions import feedback_retract
from controlplane.services.versions import lineage_create
from controlplane.services.windows import window_collect
from controlplane.states import Consent, StepState, VersionState
from rl_core.store import open_store
from tests.lane_rows import ACTOR, lane_world, thumbs

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def receive(world, body):
    receipt = feedback_receive(project=world.project, sender="key", source=None, data=body, actor=ACTOR)
    return Feedback.objects.get(id=receipt.feedback_id)


def withdraw(world, user="user-1"):
    return consent_withdraw(lane=world.lane, user_key=user, actor=ACTOR, reason=f"{user} asked us to")


def trained_on(world, *generations, state=StepState.PUBLISHED):
    """A step of a run of the lane's with these generations in its batch; its version when it is published."""
    lineage = lineage_create(project=world.project, model=world.model, parent=world.lane.promoted_version)
    run = Run.objects.create(project=world.project, name="window", spec={}, lineage=lineage)
    stage = Stage.objects.create(run=run, position=0, kind="realtime", spec={})
    version = None
    if state == StepState.PUBLISHED:
        version = PolicyVersion.objects.create(
            lineage=lineage,
            epoch=0,
            number=1,
            state=VersionState.COMMITTED,
            root="c" * 64,
            manifest_key="m",
            committed_at=timezone.now(),
        )
    step = Step.objects.create(run=run, stage=stage, number=1, base_version=lineage.head, version=version, state=state)
    for position, generation in enumerate(generations):
        BatchItem.objects.create(
            step=step,
            position=position,
            group_key="window",
            reward=1.0,
            trajectory_key=generation.content_key,
            generation_id=generation.id,
        )
    return step


def blobs(store):
    return {item.key for item in store.list("") if item.key.startswith("blobs/")}


def test_nothing_of_the_user_is_in_the_next_window(store):
    world = lane_world()
    mine, other = world.generate(store, user_key="user-1"), world.generate(store, user_key="user-2")
    for generation in (mine, other):
        receive(world, thumbs(generation.id, comment="text", actor={"hash": str(generation.id)}))
    assert {item.generation.id for item in window_collect(lane=world.lane).items} == {mine.id, other.id}
    assert withdraw(world).generations == 1
    window = window_collect(lane=world.lane)
    assert {item.generation.id for item in window.items} == {other.id}
    assert window.without_consent == 1


def test_versions_that_were_trained_on_it_are_named_and_told(store):
    world = lane_world()
    mine, more = world.generate(store, user_key="user-1"), world.generate(store, user_key="user-1")
    other, third = world.generate(store, user_key="user-2"), world.generate(store, user_key="user-2")
    first, second = trained_on(world, mine, other), trained_on(world, more)
    trained_on(world, third)
    found = withdraw(world)
    assert sorted(found.trained_versions) == sorted([str(first.version), str(second.version)])
    assert found.in_training == 0
    told = Event.objects.get(project=world.project, type="consent.withdrawn")
    assert told.data["trained"] == found.trained_versions
    assert (told.data["generations"], told.data["versions"], told.topic_id) == (2, 2, f"lane:{world.lane.id}")
    assert "user-1" not in told.reason


def test_texts_go_and_metadata_stays(store):
    world = lane_world()
    mine = world.generate(store, user_key="user-1", session="s1")
    given = receive(world, thumbs(mine.id, comment="zanzibar", demonstration="marmalade", tags={"a": "b"}))
    outcome = receive(world, thumbs(mine.id, target={"kind": "episode", "id": "s1"}, comment="zanzibar"))
    withdraw(world)
    for row in (given, outcome):
        row.refresh_from_db()
        assert (row.comment, row.demonstration, row.tags, row.consent) == ("", "", {}, Consent.NONE)
        assert (row.value, row.state) == (True, "joined")
    row = Generation.objects.get(id=mine.id)
    assert (row.consent, row.user_hash) == (Consent.NONE, user_hash(lane=world.lane, user_key="user-1"))
    assert (row.prompt_tokens, row.session) == (2, "s1")


def test_content_goes_once_no_step_needs_it(store):
    world = lane_world()
    mine, batched = world.generate(store, user_key="user-1"), world.generate(store, user_key="user-1", text="Other.")
    kept = world.generate(store, user_key="user-2", text="Kept.")
    step = trained_on(world, batched, state=StepState.BATCHED)
    found = withdraw(world)
    assert (found.generations, found.in_training, found.trained_versions) == (2, 1, [])
    assert content_release(store=store) == 1
    assert blobs(store) == {batched.content_key, kept.content_key}
    assert Generation.objects.get(id=mine.id).content_key == ""
    Step.objects.filter(id=step.id).update(state=StepState.PUBLISHED)
    assert content_release(store=store) == 1
    assert blobs(store) == {kept.content_key}
    assert content_release(store=store) == 0


def test_it_is_safe_to_repeat_and_later_answers_have_their_own_consent(store):
    world = lane_world()
    world.generate(store, user_key="user-1")
    assert withdraw(world).generations == 1
    assert withdraw(world).generations == 1
    later = world.generate(store, user_key="user-1", text="Later.")
    assert Generation.objects.get(id=later.id).consent == Consent.TRAIN
    assert withdraw(world, user="nobody").generations == 0


def test_nobody_is_meant_without_a_key(store):
    world = lane_world()
    world.generate(store, user_key="")
    with pytest.raises(Invalid):
        withdraw(world, user="")
    assert Generation.objects.get(lane=world.lane).consent == Consent.TRAIN


def test_a_retracted_outcome_names_the_versions_of_all_its_turns(store):
    world = lane_world()
    first, last = (world.generate(store, session="s1") for _ in range(2))
    step = trained_on(world, first)
    row = receive(world, thumbs(last.id, target={"kind": "episode", "id": "s1"}))
    assert feedback_retract(project=world.project, feedback_id=row.id, actor=ACTOR) == [str(step.version)]
    alone = receive(world, thumbs(last.id))
    assert feedback_retract(project=world.project, feedback_id=alone.id, actor=ACTOR) == []
