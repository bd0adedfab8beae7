"""Alerts on their page: resolved with what was found, posted to hooks whose secret is shown once."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.models import Alert, AlertDelivery, AlertHook, Event
from controlplane.services.alerts import alert_raise
from controlplane.states import AlertKind, MemberRole
from tests.lane_story import Story, empty_lane

pytestmark = pytest.mark.django_db


@pytest.fixture
def story() -> Story:
    return empty_lane(cadence=True)


def client_of(story: Story, role: MemberRole = MemberRole.ENGINEER) -> Client:
    client = Client()
    client.force_login(story.workspace.people[role.value])
    return client


def raised(story: Story, **changes: Any) -> Alert:
    values: dict[str, Any] = {"subject": "v:refusal", "detail": {"about": "refusal", "reason": "it rose"}, **changes}
    alert = alert_raise(lane=story.lane, kind=AlertKind.BEHAVIOUR, holds=True, **values)
    assert alert is not None
    return alert


def test_an_alert_is_resolved_with_a_reason_and_its_lane_goes_on(story: Story) -> None:
    alert = raised(story)
    assert story.lane.hold_reason
    reviewer = client_of(story, MemberRole.REVIEWER)
    address = reverse("alert_resolve", args=[alert.pk])
    form = reviewer.get(address).content.decode()
    assert "Lane assistant is held by it" in form
    assert reviewer.post(address, {"reason": ""}).status_code == 409
    done = reviewer.post(address + "?from=lane", {"reason": "prompts changed, not the model"})
    assert done.headers["Location"] == reverse("lane", args=[story.lane.pk])
    alert.refresh_from_db()
    assert alert.resolution == "prompts changed, not the model"
    assert alert.resolved_by == story.workspace.people["reviewer"]
    assert story.lane.hold_reason == ""
    assert reviewer.post(address, {"reason": "again"}).status_code == 409
    page = client_of(story, MemberRole.VIEWER).get(reverse("alerts")).content.decode()
    assert "Nothing is open" in page
    assert "prompts changed, not the model" in page


def test_a_hook_is_added_its_secret_shown_once_and_it_is_disabled(story: Story) -> None:
    client = client_of(story)
    made = client.post(reverse("alerts"), {"url": "https://alerts.example.com/in"})
    assert made.status_code == 200
    assert "no-store" in made.headers["Cache-Control"]
    secret = re.search(r'id="secret">(whsec_[^<]+)<', made.content.decode())
    assert secret is not None
    again = client.get(reverse("alerts")).content.decode()
    assert secret[1] not in again
    assert "https://alerts.example.com/…" in again
    alert = raised(story)
    assert "○ waits" in client.get(reverse("alerts")).content.decode()
    AlertDelivery.objects.filter(alert=alert).update(status=200, delivered_at=alert.created_at)
    assert "✓ 200" in client.get(reverse("alerts")).content.decode()
    hook = AlertHook.objects.get()
    client.post(reverse("hook_disable", args=[hook.pk]), {"reason": "moved"})
    hook.refresh_from_db()
    assert hook.disabled_at is not None
    assert Event.objects.filter(type="alert_hook.changed", reason="moved").exists()


def test_an_address_that_is_not_allowed_is_refused_beside_its_field(story: Story) -> None:
    answer = client_of(story).post(reverse("alerts"), {"url": "http://169.254.169.254/latest"})
    assert answer.status_code == 422
    assert "url" in answer.context["problems"].by_field
    assert not AlertHook.objects.exists()


def test_permissions(story: Story) -> None:
    alert = raised(story)
    viewer, reviewer = client_of(story, MemberRole.VIEWER), client_of(story, MemberRole.REVIEWER)
    assert viewer.get(reverse("alerts")).status_code == 200
    for client in (viewer, reviewer):
        assert client.post(reverse("alerts"), {"url": "https://alerts.example.com/in"}).status_code == 403
    assert viewer.post(reverse("alert_resolve", args=[alert.pk]), {"reason": "mine"}).status_code == 403
    alert.refresh_from_db()
    assert alert.resolved_at is None
