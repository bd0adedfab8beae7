"""The endpoints that products call, and those around them, over HTTP."""

from __future__ import annotations

import json
import uuid

import pytest
from django.conf import settings
from django.test import Client

from controlplane.models import ApiKey, Event, Feedback, FeedbackSource, RejectedPayload
from controlplane.services.events import SYSTEM
from controlplane.services.sources import source_configure, source_create, source_key_create
from controlplane.services.tenancy import api_key_create
from controlplane.states import Scope
from rl_core.signals.product import DETECTORS
from rl_core.store import open_store
from tests.controlplane.api.api_factories import client_of, make_user
from tests.lane_rows import ACTOR, lane_world, thumbs

pytestmark = pytest.mark.django_db
JSON = "application/json"


class Sending:
    """A lane's project and clients of it: a key for feedback, an owner."""

    def __init__(self, tmp_path):
        self.world = lane_world()
        self.store = open_store(str(tmp_path))
        _, token = api_key_create(project=self.world.project, name="app", scopes=[Scope.FEEDBACK], actor=SYSTEM)
        self.app, self.owner = client_of(token), client_of(make_user(self.world.project))
        self.base = f"/api/v1/projects/{self.world.project.slug}"

    def answer(self, **changes):
        return self.world.generate(self.store, **changes)

    def send(self, path, body, client=None):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return (client or self.app).generic("POST", f"/api/v1/{path}", raw, content_type=JSON)

    def source(self, **limits):
        source, _ = source_create(project=self.world.project, slug=f"s-{uuid.uuid4().hex[:8]}", actor=ACTOR, **limits)
        _, token = source_key_create(source=source, name="app", actor=ACTOR, created_by=None)
        return source, client_of(token)


@pytest.fixture
def sending(tmp_path):
    return Sending(tmp_path)


def test_one_event_and_what_becomes_of_it(sending):
    body = thumbs(sending.answer().id)
    first, again = sending.send("feedback", body), sending.send("feedback", body)
    early = sending.send("feedback", thumbs(uuid.uuid4()))
    other = sending.send("feedback", {**body, "value": False})
    dry = sending.send("feedback", thumbs(uuid.uuid4(), dry_run=True))
    assert [answer.status_code for answer in (first, again, early, other, dry)] == [201, 200, 202, 409, 200]
    assert first.json() == {"id": again.json()["id"], "join": "joined", "duplicate": False}
    assert again.json()["duplicate"] is True
    assert dry.json() == {"id": None, "join": "pending", "duplicate": False}
    assert (other["Content-Type"], other.json()["code"]) == ("application/problem+json", "conflict")


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"", 400, "malformed"),
        (b"{", 400, "malformed"),
        (b"\xff\xfe", 400, "malformed"),
        (b"NaN", 400, "malformed"),
        (b"[]", 422, "invalid"),
        (b"{}", 422, "invalid"),
        (b'{"items": []}', 422, "invalid"),
        (b" " * 70_000, 413, "too_large"),
    ],
)
def test_a_body_that_is_no_event_is_refused(sending, raw, status, code):
    answer = sending.send("feedback", raw)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    kept = 0 if status == 413 else 1
    assert RejectedPayload.objects.filter(project=sending.world.project).count() == kept


def test_a_batch_answers_for_each(sending):
    generation = sending.answer()
    good = thumbs(generation.id)
    items = [good, {"event_id": "x"}, thumbs(uuid.uuid4()), good, thumbs(generation.id, signal="none")]
    answer = sending.send("feedback/batch", {"items": items})
    assert answer.status_code == 207
    told = answer.json()
    assert [(one["index"], one["status"], one["duplicate"]) for one in told["accepted"]] == [
        (0, 201, False),
        (2, 202, False),
        (3, 200, True),
    ]
    assert [(one["index"], one["event_id"], one["status"], one["field"]) for one in told["errors"]] == [
        (1, "x", 422, "event_id"),
        (4, items[4]["event_id"], 404, "signal"),
    ]
    assert RejectedPayload.objects.filter(project=sending.world.project).count() == 2


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{}", 422),
        (b'{"items": []}', 422),
        (b'{"items": [' + b",".join([b"1"] * 501) + b"]}", 422),
        (b" " * (1024 * 1024 + 1), 413),
    ],
)
def test_a_batch_that_is_none_is_refused_as_a_whole(sending, raw, status):
    for path in ("feedback/batch", "product-events"):
        assert sending.send(path, raw).status_code == status


def test_other_media_types_are_415_and_other_methods_405(sending):
    for path in ("feedback", "feedback/batch", "product-events"):
        assert sending.app.generic("POST", f"/api/v1/{path}", b"a=1", content_type="text/plain").status_code == 415
        assert sending.app.get(f"/api/v1/{path}").status_code == 405
        assert client_of().generic("POST", f"/api/v1/{path}", b"{}", content_type=JSON).status_code == 401


def test_a_person_may_send_too_with_the_csrf_token(sending):
    answer = sending.send("feedback", thumbs(sending.answer().id), client=sending.owner)
    assert answer.status_code == 404, "without a key it is not known which project is meant"
    bare = Client(enforce_csrf_checks=True)
    bare.force_login(make_user(sending.world.project))
    assert bare.post("/api/v1/feedback", b"{}", content_type=JSON).status_code == 403


def test_over_the_limit_is_429_with_retry_after(sending):
    _, client = sending.source(rate_per_minute=60)
    generation = sending.answer()
    items = [thumbs(generation.id, actor={"hash": str(number)}) for number in range(62)]
    told = sending.send("feedback/batch", {"items": items}, client=client).json()
    assert (len(told["accepted"]), {one["status"] for one in told["errors"]}) == (60, {429})
    assert {one["code"] for one in told["errors"]} == {"throttled"}
    assert all(1 <= one["retry_after_s"] <= 2 for one in told["errors"])
    for path, body in (("feedback", thumbs(generation.id)), ("feedback/batch", {"items": [thumbs(generation.id)]})):
        answer = sending.send(path, body, client=client)
        assert (answer.status_code, answer.json()["code"]) == (429, "throttled")
        assert 1 <= int(answer["Retry-After"]) <= 2
    assert not RejectedPayload.objects.filter(project=sending.world.project).exists()


def test_feedback_under_a_sources_key_is_that_sources(sending):
    source, client = sending.source(trust_weight=0.25)
    body = thumbs(sending.answer().id)
    answer = sending.send("feedback", body, client=client)
    row = Feedback.objects.get(id=answer.json()["id"])
    assert (row.source, row.sender) == (source, source.slug)
    source_configure(source=source, actor=ACTOR, disabled=True)
    gone = sending.send("feedback", thumbs(sending.answer().id), client=client)
    assert (gone.status_code, gone.json()["code"]) == (410, "gone")


def product(generation_id, event, **changes):
    body = {key: value for key, value in thumbs(generation_id).items() if key not in ("signal", "value")}
    return {**body, "event": event, **changes}


def test_product_events_become_signals_and_their_texts_are_forgotten(sending):
    generation = sending.answer()
    assert sending.owner.post(f"{sending.base}/signals/detected", {}, format="json").status_code == 200
    edit = {"kind": "edit_observed", "before": "a b", "after": "a zanzibar", "now": "a zanzibar", "after_s": 600}
    events = [
        edit,
        {"kind": "regenerated"},
        {"kind": "copied", "characters": 5, "answer_characters": 10},
        {"kind": "decided", "accepted": False},
        {"kind": "waited", "first_token_ms": 100, "total_ms": 2500},
        {"kind": "followed_up", "text": "No, that is still wrong: zanzibar", "previous": "Fix it"},
        {"kind": "danced"},
        {**edit, "after": "a b"},
        {"kind": "copied", "characters": 5, "answer_characters": 0},
    ]
    items = [product(generation.id, event) for event in events]
    told = sending.send("product-events", {"items": [*items, items[0]]}).json()
    assert [(one["index"], one["status"]) for one in told["accepted"]] == [*((n, 201) for n in range(6)), (9, 200)]
    assert [(one["index"], one["status"]) for one in told["errors"]] == [(6, 422), (7, 422), (8, 422)]
    rows = Feedback.objects.filter(project=sending.world.project).select_related("signal")
    assert {row.signal.slug: row.value for row in rows} == {
        "edit_persisted": 1.0,
        "regenerated": True,
        "copied": 0.5,
        "accepted": False,
        "latency_s": 2.5,
        "dissatisfied_followup": True,
    }
    assert {row.consent for row in rows} == {"train"}
    assert all("zanzibar" not in str(vars(row)) for row in rows)


def test_a_product_event_shares_its_ids_with_feedback(sending):
    generation = sending.answer()
    sending.owner.post(f"{sending.base}/signals/detected", {}, format="json")
    item = product(generation.id, {"kind": "decided", "accepted": True})
    assert sending.send("product-events", {"items": [item]}).json()["accepted"][0]["status"] == 201
    same = {key: value for key, value in item.items() if key != "event"} | {"signal": "accepted", "value": True}
    assert sending.send("feedback", same).json()["duplicate"] is True
    assert sending.send("feedback", {**same, "value": False}).status_code == 409


def test_product_events_without_their_signals_say_which_is_missing(sending):
    item = product(sending.answer().id, {"kind": "regenerated"})
    [error] = sending.send("product-events", {"items": [item]}).json()["errors"]
    assert (error["status"], error["field"]) == (404, "signal")
    assert "regenerated" in error["detail"]


def test_detected_signals_are_defined_once(sending):
    first = sending.owner.post(f"{sending.base}/signals/detected", {}, format="json").json()
    again = sending.owner.post(f"{sending.base}/signals/detected", {}, format="json").json()
    assert first == again
    assert {one["slug"] for one in first["signals"]} == {detector.signal for detector in DETECTORS.values()}


def test_a_detectors_name_that_is_taken_by_another_type_is_refused(sending):
    body = {"slug": "copied", "value_type": "boolean"}
    assert sending.owner.post(f"{sending.base}/signals", body, format="json").status_code == 201
    answer = sending.owner.post(f"{sending.base}/signals/detected", {}, format="json")
    assert (answer.status_code, answer.json()["field"]) == (422, "slug")


def test_sources_are_made_configured_keyed_and_rotated(sending):
    slug = f"s-{uuid.uuid4().hex[:8]}"
    made = sending.owner.post(f"{sending.base}/sources", {"slug": slug, "rate_per_minute": 100}, format="json").json()
    assert made["secret"].startswith("whsec_")
    assert (made["rate_per_minute"], made["actor_rate_per_minute"], made["live_secrets"]) == (100, 6000, 1)
    path = f"{sending.base}/sources/{slug}"
    change = {"trust_weight": 0.5, "actor_rate_per_minute": 7, "disabled": True, "reason": "too loud"}
    changed = sending.owner.post(f"{path}/configure", change, format="json").json()
    assert (changed["trust_weight"], changed["rate_per_minute"], changed["actor_rate_per_minute"]) == (0.5, 100, 7)
    assert changed["disabled_at"] is not None
    assert "secret" not in changed
    told = Event.objects.filter(project=sending.world.project, type="source.changed").latest("id")
    assert (told.reason, told.data["changes"]["trust_weight"]) == ("too loud", [1.0, 0.5])
    before = Event.objects.count()
    assert sending.owner.post(f"{path}/configure", {"disabled": True}, format="json").status_code == 200
    assert Event.objects.count() == before, "nothing changed"
    assert sending.owner.post(f"{path}/rotate", {}, format="json").json()["live_secrets"] == 2
    assert sending.owner.post(f"{path}/rotate", {}, format="json").json()["live_secrets"] == 2
    key = sending.owner.post(f"{path}/keys", {"name": "shop"}, format="json")
    assert (key.status_code, key.json()["scopes"], key.json()["feedback_source"]) == (201, ["feedback"], slug)
    assert ApiKey.objects.get(pk=key.json()["id"]).source == FeedbackSource.objects.get(slug=slug)
    assert sending.owner.post(f"{path}/configure", {"trust_weight": 0}, format="json").status_code == 422
    assert sending.owner.post(f"{path}/configure", {"trust": 1}, format="json").status_code == 422


def test_health_says_how_feedback_comes_in(sending):
    source, client = sending.source()
    generation = sending.answer()
    body = thumbs(generation.id)
    for _ in range(3):
        sending.send("feedback", body)
    sending.send("feedback", thumbs(uuid.uuid4()), client=client)
    lost = sending.send("feedback", thumbs(uuid.uuid4()), client=client).json()["id"]
    Feedback.objects.filter(id=lost).update(state="orphaned")
    health = sending.owner.get(f"{sending.base}/feedback/health").json()
    assert (health["total"]["received"], health["total"]["repeats"]) == (3, 2)
    assert health["total"]["states"] == {"joined": 1, "pending": 1, "orphaned": 1}
    assert (health["total"]["orphan_rate"], health["total"]["duplicate_rate"]) == (0.5, 0.4)
    assert health["delays"]["n"] == 1
    assert 0 <= health["delays"]["p50"] == health["delays"]["p95"] < 60
    by_sender = {one["sender"]: one for one in health["senders"]}
    assert (by_sender[source.slug]["received"], by_sender[source.slug]["orphan_rate"]) == (2, 1.0)
    assert by_sender[source.slug]["duplicate_rate"] == 0.0
    assert sending.owner.get(f"{sending.base}/feedback/health?hours=1").status_code == 200
    for wrong in ("0", "x", "99999", "-1", "9" * 30):
        assert sending.owner.get(f"{sending.base}/feedback/health?hours={wrong}").status_code == 422


def test_consent_is_withdrawn_by_the_products_back_end(sending):
    sending.answer(user_key="ada", consent="train")
    path = f"{sending.base}/lanes/assistant/withdraw-consent"
    answer = sending.app.post(path, {"user": "ada", "reason": "asked"}, format="json")
    assert answer.json() == {"generations": 1, "trained_versions": [], "in_training": 0}
    assert sending.app.post(path, {"user": "ada"}, format="json").status_code == 422
    assert (
        sending.app.post(path.replace("assistant", "none"), {"user": "a", "reason": "b"}, format="json").status_code
        == 404
    )


def test_a_refused_product_event_is_listed_and_replayed(sending):
    generation = sending.answer()
    sending.send("product-events", {"items": [product(generation.id, {"kind": "regenerated"})]})
    [row] = sending.owner.get(f"{sending.base}/rejected-payloads").json()["results"]
    assert (row["kind"], row["code"], row["replayed_at"]) == ("product_event", "not_found", None)
    replay = f"{sending.base}/rejected-payloads/{row['id']}/replay"
    assert sending.owner.post(replay, {}, format="json").status_code == 404
    sending.owner.post(f"{sending.base}/signals/detected", {}, format="json")
    assert sending.owner.post(replay, {}, format="json").json()["join"] == "joined"


def test_the_body_limit_of_the_project_stands_above(sending):
    raw = b'{"items": ["' + b"x" * settings.DATA_UPLOAD_MAX_MEMORY_SIZE + b'"]}'
    assert sending.send("feedback/batch", raw).status_code == 413
