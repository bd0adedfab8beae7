"""The inbox of refused payloads: bounded in number, bytes and age, and replayed through the full validation."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta

import pytest
from django.db.models import F

from controlplane.errors import Conflict, Gone, Invalid, Malformed, NotFound, Throttled
from controlplane.models import Event, Feedback, RejectedPayload
from controlplane.services import rejections
from controlplane.services.entries import Sender
from controlplane.services.product_events import detected_signals_define
from controlplane.services.rejections import KEPT_FOR, Refused, payload_replay, payloads_reject, rejections_age
from controlplane.services.signals import signal_define
from controlplane.services.sources import source_configure, source_create
from controlplane.states import PayloadKind, SignalType
from rl_core.store import open_store
from tests.lane_rows import ACTOR, lane_world, thumbs

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def reject(world, *bodies, kind=PayloadKind.FEEDBACK, error=None, sender="key"):
    refused = [Refused(body, error or Invalid("wrong", "value")) for body in bodies]
    payloads_reject(sender=Sender(world.project, sender, ACTOR), kind=kind, refused=refused)


def kept(world):
    return RejectedPayload.objects.filter(project=world.project).order_by("-created_at", "-id")


def test_many_are_kept_with_one_event(store):
    world = lane_world()
    reject(world, b"1", b"2", b"3")
    told = Event.objects.get(project=world.project, type="payload.rejected")
    assert told.data == {"count": 3, "sender": "key", "codes": {"invalid": 3}}
    assert sorted(row.body for row in kept(world)) == ["1", "2", "3"]


def test_the_oldest_make_room(store, monkeypatch):
    monkeypatch.setattr(rejections, "KEPT", 5)
    world, other = lane_world(), lane_world()
    reject(other, b"theirs")
    for number in range(9):
        reject(world, str(number).encode())
    assert [row.body for row in kept(world)] == ["8", "7", "6", "5", "4"]
    assert kept(other).count() == 1


def test_bytes_are_bounded_too(store, monkeypatch):
    monkeypatch.setattr(rejections, "KEPT_BYTES", 1000)
    world = lane_world()
    for number in range(5):
        reject(world, str(number).encode() * 400)
    assert [row.body[0] for row in kept(world)] == ["4", "3"]
    assert len(kept(world)[0].body) == 400


def test_age_is_bounded(store):
    world = lane_world()
    reject(world, b"old")
    kept(world).update(created_at=F("created_at") - KEPT_FOR - timedelta(minutes=1))
    reject(world, b"new")
    assert [row.body for row in kept(world)] == ["new"], "whoever comes next clears up"
    kept(world).update(created_at=F("created_at") - KEPT_FOR - timedelta(minutes=1))
    assert rejections_age() == 1


def test_what_is_merely_too_much_is_not_kept(store):
    world = lane_world()
    reject(world, b"1", error=Throttled("slow down"))
    assert not kept(world).exists()
    assert not Event.objects.filter(project=world.project, type="payload.rejected").exists()


def test_any_bytes_can_be_kept(store):
    world = lane_world()
    reject(world, b"\x00\xff\xfe" * 50_000, error=Malformed("no \udc80 JSON \x00"))
    [row] = kept(world)
    assert len(row.body) <= 64 * 1024
    assert "\x00" not in row.body + row.detail


def test_a_whole_event_of_the_largest_size_can_be_replayed(store):
    world = lane_world()
    body = thumbs(world.generate(store).id, signal="applause", comment="c" * 10_000, demonstration="d" * 40_000)
    reject(world, json.dumps(body).encode(), error=NotFound("no signal"))
    signal_define(project=world.project, slug="applause", value_type=SignalType.BOOLEAN)
    [row] = kept(world)
    receipt = payload_replay(row=row, actor=ACTOR)
    assert receipt.status == 201
    assert Feedback.objects.get(id=receipt.feedback_id).demonstration == "d" * 40_000
    row.refresh_from_db()
    assert row.replayed_at is not None
    assert payload_replay(row=row, actor=ACTOR).duplicate


def test_a_replay_is_refused_as_the_payload_was(store):
    world = lane_world()
    generation = world.generate(store)
    good = thumbs(generation.id)
    wrong = thumbs(generation.id, value="yes")
    reject(world, json.dumps(wrong).encode(), json.dumps({**good, "value": False}).encode())
    for row, error in zip(kept(world).order_by("id"), (Invalid, None), strict=True):
        if error:
            with pytest.raises(error):
                payload_replay(row=row, actor=ACTOR)
        else:
            payload_replay(row=row, actor=ACTOR)
    reject(world, json.dumps(good).encode() + b" ", json.dumps({**good, "value": True}).encode())
    with pytest.raises(Conflict):
        payload_replay(row=kept(world)[0], actor=ACTOR)


def test_a_sources_payload_is_replayed_as_that_sources(store):
    world = lane_world()
    source, _ = source_create(project=world.project, slug=f"s-{uuid.uuid4().hex[:8]}", actor=ACTOR)
    body = json.dumps(thumbs(world.generate(store).id)).encode()
    reject(world, body, sender=source.slug)
    [row] = kept(world)
    source_configure(source=source, actor=ACTOR, disabled=True)
    with pytest.raises(Gone):
        payload_replay(row=row, actor=ACTOR)
    source_configure(source=source, actor=ACTOR, disabled=False)
    receipt = payload_replay(row=row, actor=ACTOR)
    assert Feedback.objects.get(id=receipt.feedback_id).source == source


def product_event(generation_id, **changes):
    body = {key: value for key, value in thumbs(generation_id).items() if key not in ("signal", "value")}
    return {**body, "event": {"kind": "decided", "accepted": True}, **changes}


def test_product_events_are_replayed_as_such(store):
    world = lane_world()
    body = product_event(world.generate(store).id)
    reject(world, json.dumps(body).encode(), kind=PayloadKind.PRODUCT_EVENT, error=NotFound("no signal"))
    [row] = kept(world)
    with pytest.raises(NotFound):
        payload_replay(row=row, actor=ACTOR)
    detected_signals_define(project=world.project)
    receipt = payload_replay(row=row, actor=ACTOR)
    assert Feedback.objects.get(id=receipt.feedback_id).signal.slug == "accepted"


@pytest.mark.parametrize("consent", ["none", "maybe", 7, None])
def test_without_consent_what_users_wrote_is_not_kept(store, consent):
    world = lane_world()
    body = product_event(uuid.uuid4(), event={"kind": "followed_up", "text": "zanzibar"}, consent=consent)
    raw = json.dumps(body).encode()
    reject(world, raw, raw[:-1], b"zanzibar", kind=PayloadKind.PRODUCT_EVENT)
    assert [row.body for row in kept(world)] == ["", "", ""]
    reject(world, json.dumps({**body, "consent": "eval"}).encode(), kind=PayloadKind.PRODUCT_EVENT)
    assert "zanzibar" in kept(world)[0].body
