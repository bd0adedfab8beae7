"""Feedback is stored once, joined now or later, refused clearly, and withdrawn with a tombstone."""

from __future__ import annotations

import json
import threading
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, connections

from controlplane.errors import Conflict, Gone, Invalid, Malformed, NotFound
from controlplane.models import Event, Feedback, FeedbackReceipt, Generation, RejectedPayload
from controlplane.services.entries import Sender
from controlplane.services.erasures import user_erase
from controlplane.services.feedback import feedback_receive
from controlplane.services.generations import narrowest
from controlplane.services.joins import feedback_sweep
from controlplane.services.rejections import Refused, payload_replay, payloads_reject
from controlplane.services.retractions import feedback_retract
from controlplane.services.signals import signal_define
from controlplane.states import Consent, FeedbackState, PayloadKind, SignalType
from rl_core.store import open_store
from rl_core.types import Trajectory
from tests.lane_rows import ACTOR, lane_world, thumbs

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def receive(world, body, sender="key"):
    return feedback_receive(project=world.project, sender=sender, source=None, data=body, actor=ACTOR)


def test_feedback_on_a_known_generation_is_joined(store):
    world = lane_world()
    generation = world.generate(store)
    receipt = receive(world, thumbs(f"chatcmpl-{generation.id}", comment="good"))
    row = Feedback.objects.get(id=receipt.feedback_id)
    assert (receipt.status, receipt.join) == (201, "joined")
    assert (row.generation_id, row.value, row.comment, row.state) == (generation.id, True, "good", "joined")
    assert Event.objects.filter(type="feedback.received", project=world.project).count() == 1


def test_early_feedback_waits_for_its_generation(store):
    world = lane_world()
    wanted = uuid.uuid4()
    receipt = receive(world, thumbs(wanted))
    assert (receipt.status, receipt.join) == (202, "pending")
    world.generate(store, generation_id=wanted)
    row = Feedback.objects.get(id=receipt.feedback_id)
    assert (row.state, row.generation_id) == (FeedbackState.JOINED, wanted)


def test_the_sweep_joins_what_raced_and_gives_up_past_the_horizon(store, settings):
    world = lane_world()
    generation = world.generate(store)
    raced = receive(world, thumbs(generation.id))
    Feedback.objects.filter(id=raced.feedback_id).update(state=FeedbackState.PENDING, generation_id=None)
    lost = receive(world, thumbs(uuid.uuid4()))
    assert feedback_sweep() == 1
    assert Feedback.objects.get(id=raced.feedback_id).generation_id == generation.id
    settings.FEEDBACK_HORIZON_S = -1
    assert feedback_sweep() == 1
    assert Feedback.objects.get(id=lost.feedback_id).state == FeedbackState.ORPHANED


def test_the_same_event_again_is_a_duplicate_and_another_body_a_conflict(store):
    world = lane_world()
    generation = world.generate(store)
    body = thumbs(generation.id)
    first = receive(world, body)
    again = receive(world, body)
    assert (again.status, again.duplicate, again.feedback_id) == (200, True, first.feedback_id)
    with pytest.raises(Conflict):
        receive(world, {**body, "value": False})
    assert receive(world, body, sender="other").status == 201
    assert Feedback.objects.filter(project=world.project).count() == 2


@pytest.mark.django_db(transaction=True)
def test_the_same_event_from_many_threads_is_stored_once(store):
    world = lane_world()
    generation = world.generate(store)
    body = thumbs(generation.id)
    statuses = []
    barrier = threading.Barrier(6)

    def send():
        barrier.wait()
        try:
            statuses.append(receive(world, body).status)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] * 5 + [201]
    assert Feedback.objects.filter(project=world.project).count() == 1
    assert FeedbackReceipt.objects.filter(project=world.project).count() == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"unknown": 1}, ""),
        ({"event_id": "not-a-uuid"}, "event_id"),
        ({"value": "yes"}, "value"),
        ({"value": 1}, "value"),
        ({"occurred_at": "2026-01-01T00:00:00"}, "occurred_at"),
        ({"occurred_at": (datetime.now(UTC) + timedelta(days=1)).isoformat()}, "occurred_at"),
        ({"consent": "maybe"}, "consent"),
        ({"comment": "x" * 10_001}, "comment"),
        ({"comment": "a\x00b"}, ""),
        ({"comment": "a\ud800b"}, ""),
        ({"tags": {str(number): "v" for number in range(21)}}, "tags"),
        ({"target": {"kind": "generation", "id": "nonsense"}}, "target.id"),
        ({"target": {"kind": "planet", "id": "x"}}, "target.kind"),
    ],
)
def test_a_wrong_body_names_its_field_and_stores_nothing(store, change, field):
    world = lane_world()
    generation = world.generate(store)
    with pytest.raises(Invalid) as caught:
        receive(world, thumbs(generation.id, **change))
    assert caught.value.field == field
    assert not Feedback.objects.filter(project=world.project).exists()


def test_text_that_merely_spells_an_escape_is_fine(store):
    world = lane_world()
    receipt = receive(world, thumbs(world.generate(store).id, comment="a literal \\u0000 in prose"))
    assert Feedback.objects.get(id=receipt.feedback_id).comment == "a literal \\u0000 in prose"


def test_unknown_signals_and_targets_of_other_projects_are_not_found(store):
    world, other = lane_world(), lane_world()
    foreign = other.generate(store)
    with pytest.raises(NotFound):
        receive(world, thumbs(foreign.id))
    with pytest.raises(NotFound):
        receive(world, thumbs(uuid.uuid4(), signal="applause"))


def test_numbers_are_held_to_their_range(store):
    world = lane_world()
    signal_define(project=world.project, slug="kept", value_type=SignalType.NUMBER, minimum=0, maximum=1)
    generation = world.generate(store)
    assert receive(world, thumbs(generation.id, signal="kept", value=0.5)).status == 201
    for value in (1.5, True, None, "0.5"):
        with pytest.raises(Invalid):
            receive(world, thumbs(generation.id, signal="kept", value=value))


def test_a_dry_run_says_what_would_happen_and_stores_nothing(store):
    world = lane_world()
    receipt = receive(world, thumbs(world.generate(store).id, dry_run=True))
    assert (receipt.status, receipt.join, receipt.feedback_id) == (200, "joined", None)
    assert not Feedback.objects.filter(project=world.project).exists()


def test_without_consent_the_text_of_feedback_is_not_kept(store):
    world = lane_world()
    receipt = receive(world, thumbs(world.generate(store).id, comment="secret", consent="none"))
    assert Feedback.objects.get(id=receipt.feedback_id).comment == ""


def test_retraction_leaves_a_tombstone(store):
    world = lane_world()
    receipt = receive(world, thumbs(world.generate(store).id, comment="private"))
    assert feedback_retract(project=world.project, feedback_id=receipt.feedback_id, actor=ACTOR) == []
    row = Feedback.objects.get(id=receipt.feedback_id)
    assert (row.state, row.value, row.comment) == (FeedbackState.RETRACTED, None, "")
    with pytest.raises(Gone):
        feedback_retract(project=world.project, feedback_id=receipt.feedback_id, actor=ACTOR)


def test_rejected_payloads_are_bounded_and_replayed_through_the_full_validation(store):
    world = lane_world()
    generation = world.generate(store)
    body = thumbs(generation.id, signal="applause")
    error = NotFound("no signal")
    sender = Sender(world.project, "key", ACTOR)
    for raw in (json.dumps(body).encode(), b"\x00\xff" * 100_000):
        payloads_reject(sender=sender, kind=PayloadKind.FEEDBACK, refused=[Refused(raw, error)])
    kept, junk = RejectedPayload.objects.filter(project=world.project).order_by("created_at", "id")
    assert len(junk.body) <= 64 * 1024
    with pytest.raises(NotFound):
        payload_replay(row=kept, actor=ACTOR)
    signal_define(project=world.project, slug="applause", value_type=SignalType.BOOLEAN)
    assert payload_replay(row=kept, actor=ACTOR).status == 201
    with pytest.raises(Malformed):
        payload_replay(row=junk, actor=ACTOR)


@pytest.mark.parametrize(
    ("consents", "expected"),
    [(("train", "none"), "none"), (("eval", "train"), "eval"), (("train", "train"), "train")],
)
def test_the_narrowest_consent_wins(consents, expected):
    assert narrowest(*consents) == expected


def test_without_consent_a_generation_keeps_metadata_alone(store):
    world = lane_world()
    generation = world.generate(store, consent=Consent.NONE)
    assert generation.content_key == ""
    assert (generation.prompt_tokens, generation.sampled_tokens) == (2, 3)
    assert list(store.list("")) == []


def test_a_generation_reads_back_as_a_trajectory(store):
    world = lane_world()
    generation = world.generate(store)
    trajectory = Trajectory.from_bytes(store.get_blob(generation.content_key))
    assert trajectory.segments[0].token_ids == [1, 2, 5, 6, 7]
    assert trajectory.segments[0].loss_mask == [0, 0, 1, 1, 1]
    assert trajectory.segments[0].logprobs == [0.0, 0.0, -0.1, -0.2, -0.3]
    assert trajectory.versions() == [str(world.lane.promoted_version)]


def test_erasure_leaves_no_trace_of_content_in_database_or_store(store, tmp_path):
    world = lane_world()
    marker = "zanzibar-marmalade"
    mine = world.generate(store, user_key="erase-me", content=marker, text=marker)
    kept = world.generate(store, user_key="keep-me", content="other", text="other")
    receive(world, thumbs(mine.id, comment=marker))
    assert user_erase(lane=world.lane, user_key="erase-me", actor=ACTOR, reason="asked", store=store) == 1
    assert user_erase(lane=world.lane, user_key="erase-me", actor=ACTOR, reason="asked", store=store) == 0
    row = Generation.objects.get(id=mine.id)
    assert (row.content_key, row.user_hash, row.erased_at is not None) == ("", "", True)
    blobs = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(blobs) == 1
    assert all(marker.encode() not in blob for blob in blobs)
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names():
            cursor.execute(f'SELECT count(*) FROM "{table}" t WHERE t::text LIKE %s', [f"%{marker}%"])
            assert cursor.fetchone() == (0,), table
    assert Generation.objects.get(id=kept.id).content_key
    with pytest.raises(Gone):
        receive(world, thumbs(mine.id))
