"""What people do to a lane on its pages: with a reason, a blast radius, at the revision that they saw."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.models import Event, Lane, Release
from controlplane.services.assignments import bucket_of
from controlplane.services.generations import user_hash
from controlplane.states import MemberRole, ReleaseState, SlotState
from frontend.frame import FRAGMENT_HEADER
from tests.lane_story import Story, empty_lane, lane_story
from tests.shipping_rig import age

pytestmark = pytest.mark.django_db


@pytest.fixture
def story() -> Story:
    return empty_lane(cadence=True)


def client_of(story: Story, role: MemberRole = MemberRole.OWNER) -> Client:
    client = Client()
    client.force_login(story.workspace.people[role.value])
    return client


def act(story: Story, verb: str, reason: str = "because", **data: Any) -> Any:
    address = reverse("lane_act", args=[story.lane.pk, verb])
    return client_of(story, MemberRole.ENGINEER).post(address, {"reason": reason, **data})


def text_of(response: Any) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", response.content.decode())))


def test_a_cadence_is_paused_and_resumed_with_reasons_that_are_kept(story: Story) -> None:
    answer = act(story, "pause", "release week")
    assert answer.headers["Location"] == reverse("lane", args=[story.lane.pk])
    assert story.lane.paused_at is not None
    event = Event.objects.get(type="lane.changed", reason="release week")
    assert event.actor == story.workspace.people["engineer"].username
    again = act(story, "pause", "once more")
    assert again.status_code == 409
    assert "the cadence is paused already" in text_of(again)
    act(story, "resume", "it is over")
    assert story.lane.paused_at is None


def test_a_reason_is_needed(story: Story) -> None:
    answer = act(story, "pause", "  ")
    assert answer.status_code == 409
    assert "Say why" in text_of(answer)
    assert story.lane.paused_at is None


def test_who_acts_on_what_has_moved_since_is_told_and_shown_the_present(story: Story) -> None:
    seen = story.lane.revision
    act(story, "pause", "first", revision=seen)
    late = act(story, "resume", "second", revision=seen)
    assert late.status_code == 409
    assert f"the lane is at revision {seen + 1}, not {seen}" in text_of(late)
    assert f'name="revision" value="{seen + 1}"' in late.content.decode()
    assert story.lane.paused_at is not None


def test_a_slot_is_run_and_skipped(story: Story) -> None:
    act(story, "run", "try it")
    slot = story.lane.cadence_slots.get()
    assert slot.state == SlotState.OPEN
    dialog = client_of(story).get(reverse("lane_act", args=[story.lane.pk, "skip"]), headers={FRAGMENT_HEADER: "1"})
    assert "Slot 1 ends now" in text_of(dialog)
    assert "<html" not in dialog.content.decode()
    act(story, "skip", "not today")
    slot.refresh_from_db()
    assert (slot.state, slot.reason) == (SlotState.SKIPPED, "not today")
    assert client_of(story).get(reverse("lane_act", args=[story.lane.pk, "explode"])).status_code == 404


def test_a_lane_without_a_cadence_runs_no_slot() -> None:
    story = empty_lane()
    assert "set one first" in text_of(act(story, "run"))


@pytest.fixture
def told() -> Story:
    return lane_story(users=80)


def test_the_blast_radius_is_told_before_and_matches_what_happens(told: Story) -> None:
    release = told.flying
    assert release is not None
    met = set(release.generations.filter(arm="canary").values_list("user_hash", flat=True))
    address = reverse("release_control", args=[release.pk, "rollback"])
    client = client_of(told, MemberRole.REVIEWER)
    said = text_of(client.get(address, headers={FRAGMENT_HEADER: "1"}))
    assert f"{len(met)} of the last day, 20 % of all" in said
    events = int(re.search(r"1 version, (\d+) feedback event", said)[1])  # type: ignore[index]
    answer = client.post(address + "?from=lane", {"reason": "worse", "revision": release.revision})
    assert answer.headers["Location"] == reverse("lane", args=[told.lane.pk])
    release.refresh_from_db()
    release.version.refresh_from_db()
    assert release.state == ReleaseState.ROLLED_BACK
    assert release.version.quarantined_at is not None
    ids = release.generations.filter(version=release.version).values("id")
    assert told.world.project.feedback.filter(generation_id__in=ids, state="quarantined").count() == events > 0
    gone = client.post(address, {"reason": "again"})
    assert gone.status_code == 409


def test_a_release_is_paused_resumed_stepped_on_and_aborted(told: Story) -> None:
    release, client = told.flying, client_of(told)
    assert release is not None
    assert told.alert is not None
    client.post(reverse("alert_resolve", args=[told.alert.pk]), {"reason": "a known trait"})

    def post(verb: str, **data: Any) -> Any:
        return client.post(reverse("release_control", args=[release.pk, verb]), {"reason": f"to {verb}", **data})

    for verb, state in (("pause", ReleaseState.PAUSED), ("resume", ReleaseState.CANARY)):
        assert post(verb).status_code == 302
        release.refresh_from_db()
        assert release.state == state
    shown = text_of(client.get(reverse("release_control", args=[release.pk, "advance"])))
    assert "The candidate then answers 50% of users." in shown
    assert post("advance").status_code == 302
    release.refresh_from_db()
    assert release.share == 0.5
    promoted = post("promote")
    assert promoted.status_code == 409
    assert "the canary's last step" in text_of(promoted)
    assert post("abort").headers["Location"] == reverse("release", args=[release.pk])
    release.refresh_from_db()
    assert (release.state, release.outcome) == (ReleaseState.SKIPPED, "to abort")
    assert client.get(reverse("release_control", args=[release.pk, "explode"])).status_code == 404


def test_a_lane_returns_to_an_earlier_version(told: Story) -> None:
    first = told.lane.served.order_by("created_at").first()
    assert first is not None
    address = reverse("lane_rollback", args=[told.lane.pk, first.version_id])
    client = client_of(told, MemberRole.REVIEWER)
    shown = text_of(client.get(address))
    assert "No replica holds it now" in shown
    client.post(address, {"reason": "it was better", "revision": told.lane.revision})
    assert told.lane.rollback_to_id == first.version_id
    status = text_of(client.get(reverse("lane_part", args=[told.lane.pk, "status"])))
    assert "rolling back" in status
    assert Release.objects.get(pk=told.flying.pk).state == ReleaseState.SKIPPED  # type: ignore[union-attr]
    other = empty_lane()
    stranger = reverse("lane_rollback", args=[other.lane.pk, first.version_id])
    assert client_of(other).get(stranger).status_code == 404


def test_what_served_when_knows_the_canary_of_each_user(told: Story) -> None:
    release, lane, client = told.flying, told.lane, client_of(told, MemberRole.VIEWER)
    assert release is not None
    served = lane.served.get(arm="canary", until__isnull=True)
    age(served, 600)  # the step was aged by the story, so that both hold a minute ago
    at = (datetime.now(UTC) - timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M:%S")

    def ask(user: str) -> str:
        response = client.post(reverse("lane_served", args=[lane.pk]), {"at": at, "user": user})
        assert response.status_code == 200
        return text_of(response).split("What answered, and where")[0]

    keys = [f"user-{number}" for number in range(500, 560)]
    inside = [key for key in keys if bucket_of(release.salt, user_hash(lane=lane, user_key=key)) < 0.2]
    outside = [key for key in keys if key not in inside]
    assert inside
    assert outside
    assert "the user met the candidate" in ask(inside[0])
    assert "the user met the candidate" not in ask(outside[0])
    assert "the user met the candidate" not in ask("")
    wrong = client.post(reverse("lane_served", args=[lane.pk]), {"at": "yesterday"})
    assert wrong.status_code == 422
    assert "Give a moment" in text_of(wrong)
    early = client.post(reverse("lane_served", args=[lane.pk]), {"at": "2001-01-01T00:00"})
    assert "Nothing: the lane was made later." in text_of(early)


def cadence(story: Story, **changes: Any) -> Any:
    """Post the settings form as the browser would, with some fields changed."""
    client = client_of(story, MemberRole.ENGINEER)
    address = reverse("lane_cadence", args=[story.lane.pk])
    form = client.get(address).context["form"]
    data: dict[str, Any] = {**form.values, "mode": "fields", "reason": "tuned", **dict.fromkeys(form.flags, "on")}
    for name in form.metrics[0]:
        data[f"metric_{name}"] = [row[name] for row in form.metrics]
    return client.post(address, {**data, "spec": form.text, **changes})


def test_the_settings_form_changes_what_it_says_and_nothing_else(story: Story) -> None:
    before = story.lane.cadence
    assert cadence(story).status_code == 302
    assert story.lane.cadence == before
    answer = cadence(
        story,
        interval="5 h",
        minimum_signals="200",
        steps="1, 5, 25",
        hold="90 min",
        timezone="Europe/Paris",
        freezes="weekly Sat,Sun 18:00-24:00\ndate 2026-12-25\n",
        stage='{"minimum_answers": 100}',
        auto_promote="on",
    )
    assert answer.status_code == 302, text_of(answer)
    after = story.lane.cadence
    assert after["interval_s"] == 18_000
    assert after["minimum_signals"] == 200
    assert after["canary"]["steps"] == [0.01, 0.05, 0.25]
    assert after["canary"]["hold_s"] == 5400
    assert after["canary"]["metrics"] == before["canary"]["metrics"]
    assert after["freezes"][0] == {"kind": "weekly", "days": [5, 6], "start": "18:00", "end": "24:00"}
    assert after["stage"] == {"minimum_answers": 100}
    assert after["auto_promote"] is True
    assert after["gate"] == before["gate"]


def test_an_unticked_box_is_off(story: Story) -> None:
    cadence(story, auto_promote="on", require_gain="on")
    assert story.lane.cadence["canary"]["require_gain"] is True
    cadence(story, require_gain="")
    assert story.lane.cadence["canary"]["require_gain"] is False
    assert story.lane.cadence["auto_promote"] is True


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("interval", "soon", "Give a duration"),
        ("steps", "50, 20", "steps must rise"),
        ("steps", "half", "Give percentages"),
        ("minimum_users", "1", "minimum_users must be at least 2"),
        ("gate_tasks", "many", "Give a whole number"),
        ("gate_tasks", "0", "tasks must be at least 1"),
        ("shadow_margin", "-1", "margin must not be negative"),
        ("threshold", "0", "threshold must be positive"),
        ("timezone", "Middle/Earth", "is not known here"),
        ("freezes", "weekly Foo", "'Foo' is no day"),
        ("freezes", "date 2026-13-01", "line 1"),
        ("freezes", "weekly Mon,Tue,Wed,Thu,Fri,Sat,Sun", "cover the whole week"),
        ("stage", "{", "This is not JSON"),
        ("stage", '{"lane": "other"}', "stage must not name a lane"),
        ("reason", "", "Say why"),
    ],
)
def test_what_is_wrong_is_said_beside_its_field(story: Story, field: str, value: str, message: str) -> None:
    before = story.lane.cadence
    answer = cadence(story, **{field: value})
    assert answer.status_code == 422
    assert any(message in text for text in answer.context["form"].problems.by_field[field]), answer.context[
        "form"
    ].problems.by_field
    assert html.escape(message) in answer.content.decode()
    assert story.lane.cadence == before


def test_metrics_are_rows_of_which_nameless_ones_are_left_out(story: Story) -> None:
    row = {"name": ["reward", ""], "source": ["signal", "signal"], "key": ["thumbs", ""], "role": ["goal", "goal"]}
    row |= {"direction": ["higher", "higher"], "margin": ["0.1", ""], "alpha_share": ["", ""]}
    assert cadence(story, **{f"metric_{name}": values for name, values in row.items()}).status_code == 302
    [metric] = story.lane.cadence["canary"]["metrics"]
    assert (metric["name"], metric["key"], metric["margin"]) == ("reward", "thumbs", 0.1)
    wrong = cadence(story, metric_margin=["much", ""])
    assert wrong.context["form"].problems.by_field["metrics"] == ["reward: margin is not a number"]


def test_json_is_taken_whole_and_off_is_off(story: Story) -> None:
    assert cadence(story, mode="json", spec='{"interval_s": 600}').status_code == 302
    assert story.lane.cadence["interval_s"] == 600
    wrong = cadence(story, mode="json", spec='{"interval": 600}')
    assert "unknown field `interval`" in wrong.context["form"].problems.by_field["spec"][0]
    assert cadence(story, mode="json", spec="[]").status_code == 422
    assert cadence(story, mode="off").status_code == 302
    assert story.lane.cadence == {}


def test_settings_that_changed_meanwhile_are_not_overwritten(story: Story) -> None:
    Lane.objects.filter(pk=story.lane.pk).update(revision=7)
    answer = cadence(story, interval="1 h", revision="6")
    assert "the lane is at revision 7, not 6" in text_of(answer)
    assert story.lane.cadence["interval_s"] == 0
