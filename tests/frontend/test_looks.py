"""Every state and every kind of event has a look."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane import states
from controlplane.services.events import SYSTEM, event_append, project_topic
from controlplane.states import TRANSITIONS, AttemptState, EventType
from frontend.looks import EVENT_SENTENCES, STATE_LOOKS, Tone, event_sentence, event_tone, look_of
from tests.factories import HOSTILE, make_workspace


@pytest.mark.parametrize("kind", [*TRANSITIONS, AttemptState], ids=lambda kind: kind.__name__)
def test_every_state_has_a_look(kind: type[states.TextChoices]) -> None:
    assert {state.value for state in kind} - set(STATE_LOOKS) == set()


def test_an_unknown_state_is_neutral() -> None:
    assert look_of("of-tomorrow").tone is Tone.IDLE


def test_every_kind_of_event_has_a_sentence() -> None:
    assert set(EVENT_SENTENCES) == set(EventType)


@pytest.mark.parametrize(
    ("event_type", "data", "sentence"),
    [
        ("step.changed", {"number": 3, "state": "published"}, "Step 3 is published"),
        ("group.changed", {"positions": [4, 5], "state": "admitted"}, "Groups 4, 5 are admitted"),
        ("group.changed", {"position": 4, "state": "ready"}, "Group 4 is ready"),
        ("metrics.recorded", {"step": None}, "Metrics recorded"),
        (
            "transfer.changed",
            {"version": "0192-abcdef:1-7", "cluster": "east", "state": "done"},
            "Transfer of version abcdef:1-7 to east is done",
        ),
        (
            "replica.steered",
            {"action": "slot default pinned to 01a22f9a-e7fe-76d0-8c36-156d8d019888:0-3"},
            "Replica …/…: slot default pinned to 019888:0-3",
        ),
        ("run.created", {}, "Run … created"),
        ("of.tomorrow", {"x": 1}, "of.tomorrow"),
        ("slot.changed", {"number": 5, "state": "open", "detail": ""}, "Slot 5 is open"),
    ],
)
def test_sentences(event_type: str, data: dict[str, Any], sentence: str) -> None:
    assert event_sentence(event_type, data) == sentence


def test_what_goes_wrong_is_marked() -> None:
    assert event_tone("work.died", {}) is Tone.BAD
    assert event_tone("run.changed", {"state": "failed"}) is Tone.BAD
    assert event_tone("run.changed", {"state": "running"}) is Tone.IDLE


@pytest.mark.django_db
def test_the_events_page_renders_every_kind() -> None:
    workspace = make_workspace()
    client = Client()
    client.force_login(workspace.owner)
    keys = {key for sentences in EVENT_SENTENCES.values() for text in sentences for key in _keys(text)}
    for full in (True, False):
        for event_type in EventType:
            event_append(
                project_id=workspace.project.pk,
                topic=project_topic(workspace.project.pk),
                event_type=event_type,
                actor=SYSTEM,
                reason=HOSTILE,
                data={key: HOSTILE if key != "run" else str(uuid.uuid4()) for key in keys} if full else {},
            )
        for event_type in EventType:
            body = client.get(reverse("events"), {"type": event_type.value}).content.decode()
            assert f">{event_type.value}</td>" in body
            assert "<script>alert" not in body


def _keys(text: str) -> list[str]:
    from string import Formatter

    return [key for _, key, _, _ in Formatter().parse(text) if key]
