"""The feedback page, its sources, and its inbox of refused payloads."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.models import Event, FeedbackSource, RejectedPayload
from controlplane.services.sources import source_create
from controlplane.services.tenancy import api_key_create
from controlplane.states import MemberRole, Scope
from tests.lane_rows import ACTOR, thumbs
from tests.lane_story import Story, empty_lane

pytestmark = pytest.mark.django_db


@pytest.fixture
def story() -> Story:
    return empty_lane()


def client_of(story: Story, role: MemberRole = MemberRole.ENGINEER) -> Client:
    client = Client()
    client.force_login(story.workspace.people[role.value])
    return client


def text_of(response: Any) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", response.content.decode())))


def test_counts_and_rates_are_those_of_the_week(story: Story) -> None:
    story.answer(30, seed=2)
    _, key = api_key_create(
        project=story.world.project, name="the product", scopes=[Scope.FEEDBACK], actor=ACTOR, created_by=None
    )
    generation = story.lane.generations.first()
    assert generation is not None
    body = thumbs(generation.id)
    for _ in range(3):
        Client().post(
            "/api/v1/feedback", body, content_type="application/json", headers={"Authorization": f"Bearer {key}"}
        )
    shown = client_of(story).get(reverse("feedback"))
    total = shown.context["view"].health.total
    assert (total.received, total.repeats) == (story.world.project.feedback.count(), 2)
    text = text_of(shown)
    assert f"Received {total.received} in the last 7 days" in text
    assert f"{100 * 2 / (total.received + 2):.1f} % 2 sent again" in text
    assert "key the product 1 1 0" in text


def test_filters_narrow_by_state_signal_and_sender(story: Story) -> None:
    story.answer(20, seed=2)
    source, _ = source_create(project=story.world.project, slug="web-app", actor=ACTOR)
    story.send([(row, True) for row in story.lane.generations.all()[:3]], source)
    client = client_of(story)

    def senders(query: str) -> set[str]:
        return {row.sender for row in client.get(reverse("feedback") + query).context["view"].events}

    assert senders("") == {"product", "web-app"}
    assert senders("?sender=web-app") == {"web-app"}
    assert senders("?sender=web-app&state=joined&signal=thumbs") == {"web-app"}
    assert senders("?state=orphaned") == set()
    assert "Nothing matches" in text_of(client.get(reverse("feedback") + "?signal=none"))
    assert senders("?state=\x00&signal=%00") == {"product", "web-app"}


def test_a_refused_payload_is_replayed_once_its_cause_is_mended(story: Story) -> None:
    story.answer(1, seed=2)
    generation = story.lane.generations.get()
    _, key = api_key_create(
        project=story.world.project, name="k", scopes=[Scope.FEEDBACK], actor=ACTOR, created_by=None
    )
    body = thumbs(generation.id, signal="stars", value=True)
    answer = Client().post(
        "/api/v1/feedback", body, content_type="application/json", headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 404
    row = RejectedPayload.objects.get()
    address = reverse("rejected_replay", args=[row.pk])
    viewer, engineer = client_of(story, MemberRole.VIEWER), client_of(story)
    assert "Replay" not in viewer.get(address).content.decode()
    assert viewer.post(address).status_code == 403
    assert engineer.post(address).status_code == 409
    engineer.post(reverse("signal_add"), {"act": "one", "slug": "stars", "value_type": "boolean"})
    assert engineer.post(address).headers["Location"] == reverse("feedback")
    row.refresh_from_db()
    assert row.replayed_at is not None
    assert "taken on replay" in text_of(viewer.get(reverse("feedback")))


def test_a_source_is_added_changed_switched_and_its_secrets_shown_once(story: Story) -> None:
    client = client_of(story)
    made = client.post(reverse("sources"), {"slug": "web-app", "trust_weight": "2"})
    source = FeedbackSource.objects.get(project=story.world.project)
    first = re.search(r'id="secret">(whsec_[^<]+)<', made.content.decode())
    assert first is not None
    assert "no-store" in made.headers["Cache-Control"]
    assert first[1] not in client.get(reverse("sources")).content.decode()
    page = reverse("source", args=[source.pk])
    assert client.post(page, {"act": "rotate", "reason": ""}).status_code == 422
    rotated = client.post(page, {"act": "rotate", "reason": "leaked"})
    second = re.search(r'id="secret">(whsec_[^<]+)<', rotated.content.decode())
    assert second is not None
    assert second[1] != first[1]
    assert Event.objects.filter(type="source.changed", reason="leaked").exists()
    limits = {"trust_weight": "0.5", "rate_per_minute": "100", "actor_rate_per_minute": "10", "reason": "noisy"}
    assert client.post(page, limits).status_code == 302
    source.refresh_from_db()
    assert (source.trust_weight, source.rate_per_minute, source.actor_rate_per_minute) == (0.5, 100, 10)
    switch = reverse("source_switch", args=[source.pk])
    for off in (True, False):
        client.post(switch, {"reason": "test"})
        source.refresh_from_db()
        assert (source.disabled_at is not None) == off


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"slug": "a b", "trust_weight": "1"}, "slug"),
        ({"slug": "", "trust_weight": "1"}, "slug"),
        ({"slug": "taken", "trust_weight": "1"}, "slug"),
        ({"slug": "fine", "trust_weight": "0"}, "trust_weight"),
        ({"slug": "fine", "trust_weight": "nan"}, "trust_weight"),
    ],
)
def test_a_source_that_is_none_is_refused_beside_its_field(story: Story, data: dict[str, str], field: str) -> None:
    source_create(project=empty_lane().world.project, slug="taken", actor=ACTOR)
    answer = client_of(story).post(reverse("sources"), data)
    assert answer.status_code == 422
    assert list(answer.context["problems"].by_field) == [field]
    assert not FeedbackSource.objects.filter(project=story.world.project).exists()


def test_limits_that_are_none_are_refused_beside_their_fields(story: Story) -> None:
    source, _ = source_create(project=story.world.project, slug="web-app", actor=ACTOR)
    data = {"trust_weight": "-1", "rate_per_minute": "0", "actor_rate_per_minute": "x", "reason": ""}
    answer = client_of(story).post(reverse("source", args=[source.pk]), data)
    assert answer.status_code == 422
    assert set(answer.context["problems"].by_field) == set(data)
