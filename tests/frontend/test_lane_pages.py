"""Pages of lanes, releases, feedback and alerts: full, empty, hostile; they answer, escape, and stay cheap."""

from __future__ import annotations

import html
import re
import shlex

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.models import FeedbackSource, RejectedPayload
from controlplane.services.events import SYSTEM, lane_topic, project_topic
from controlplane.services.tenancy import api_key_create
from controlplane.states import MemberRole, Scope
from frontend.views.lanes import LAZY, PARTS
from frontend.views.releases import VERBS as RELEASE_VERBS
from tests.factories import make_workspace
from tests.lane_story import Story, empty_lane

pytestmark = pytest.mark.django_db


def client_of(story: Story, role: MemberRole = MemberRole.OWNER) -> Client:
    client = Client()
    client.force_login(story.workspace.people[role.value])
    return client


def addresses(story: Story) -> list[str]:
    lane, release, alert = story.lane, story.flying, story.alert
    assert release is not None
    assert alert is not None
    source = FeedbackSource.objects.get(project=story.world.project)
    rejected = RejectedPayload.objects.get(project=story.world.project)
    first = lane.served.order_by("created_at").first()
    assert first is not None
    return [
        *(reverse(name) for name in ("home", "lanes", "feedback", "signal_map", "sources", "alerts", "alerts_badge")),
        reverse("lane", args=[lane.pk]),
        reverse("lane", args=[lane.pk]) + "?whole",
        *(reverse("lane_part", args=[lane.pk, part]) for part in PARTS),
        reverse("lane_train", args=[lane.pk]),
        reverse("lane_cadence", args=[lane.pk]),
        reverse("lane_served", args=[lane.pk]),
        *(reverse("lane_act", args=[lane.pk, verb]) for verb in ("pause", "resume", "run", "skip")),
        reverse("lane_rollback", args=[lane.pk, first.version_id]),
        *(reverse("release", args=[row.pk]) for row in lane.releases.all()),
        *(reverse("release_control", args=[release.pk, verb]) for verb in RELEASE_VERBS),
        reverse("alert_resolve", args=[alert.pk]),
        reverse("source", args=[source.pk]),
        reverse("source_switch", args=[source.pk]),
        reverse("rejected_replay", args=[rejected.pk]),
        reverse("feedback") + f"?state=joined&signal=thumbs&sender={source.slug}",
        reverse("events") + f"?topic=lane:{lane.pk}",
    ]


def test_every_page_answers_and_escapes_what_others_wrote(told: Story) -> None:
    client = client_of(told)
    for address in addresses(told):
        response = client.get(address)
        assert response.status_code == 200, address
        body = response.content.decode()
        assert "<script>alert" not in body, address
        assert "<b onmouseover" not in body, address
        assert "\x1b" not in body, address
        if "<form" not in body.split("<main", 1)[-1]:
            assert "\u202e" not in body, address


def test_pages_hold_no_inline_script_and_name_nothing_outside(told: Story) -> None:
    client = client_of(told)
    for address in addresses(told):
        response = client.get(address)
        body = response.content.decode()
        for forbidden in ("<script>", " style=", " onclick=", "javascript:", 'src="http', 'href="http', "//cdn"):
            assert forbidden not in body, (address, forbidden)
        assert "script-src 'self';" in response.headers["Content-Security-Policy"] + ";"


def test_a_stranger_logs_in_and_other_projects_see_nothing(told: Story) -> None:
    other = Client()
    other.force_login(make_workspace().owner)
    own = {reverse(name) for name in ("home", "lanes", "feedback", "signal_map", "sources", "alerts", "alerts_badge")}
    for address in addresses(told):
        assert Client().get(address).status_code == 302, address
        if address not in own and "?" not in address:
            assert other.get(address).status_code == 404, address
            assert other.post(address, {"reason": "mine"}).status_code in (404, 405), address
    for address in own:
        body = other.get(address).content.decode()
        assert str(told.lane.pk) not in body, address


def test_queries_do_not_grow_with_rows(told: Story) -> None:
    client = client_of(told)

    def counts() -> dict[str, int]:
        found = {}
        for address in addresses(told):
            with CaptureQueriesContext(connection) as queries:
                client.get(address)
            found[address] = len(queries)
        return found

    before = counts()
    told.answer(30, first=900, seed=9)
    after = counts()
    assert {address: count for address, count in after.items() if count > before[address]} == {}


def test_the_lane_shows_where_it_stands(told: Story) -> None:
    body = client_of(told).get(reverse("lane", args=[told.lane.pk]) + "?whole").content.decode()
    text = html.unescape(re.sub(r"<[^>]+>", " ", body))
    text = re.sub(r"\s+", " ", text)
    for shown in (
        "held behaviour alert on",
        "slot 3 is under way",
        "5 h 00 min",
        "weekly Sat,Sun 00:00-24:00",
        "Gate done pass",
        "Canary 20% now",
        "Canary 50% ahead",
        "1 of the last 2",
        "an alarm below 0.001",
        "quarantined",
        "map 1",
        "invalid tool calls",
    ):
        assert shown in text, shown
    assert body.count('<svg class="forest"') >= 1 + 3 + 5  # the gate, the canary's metrics, the watch's behaviours


def test_the_line_of_versions_says_where_each_came_from(told: Story) -> None:
    body = client_of(told).get(reverse("lane_part", args=[told.lane.pk, "line"])).content.decode()
    rows = re.findall(r"<tr>.*?</tr>", body.split("<tbody>")[1], re.DOTALL)
    assert len(rows) == told.lane.served.count() == 5
    newest = rows[0]
    assert "a canary" in newest
    assert "2.4 MB" in newest
    assert "answers</a>" in newest
    promoted = told.lane.promoted_version
    assert promoted is not None
    parent = f"{str(promoted.lineage_id)[-6:]}:0-1"
    assert f">{parent}</td>" in newest
    assert "Roll back" in rows[-1]
    assert "Roll back" not in newest


def test_a_release_tells_its_history(told: Story) -> None:
    rolled = told.lane.releases.get(state="rolled_back")
    body = client_of(told).get(reverse("release", args=[rolled.pk])).content.decode()
    history = body.split('id="history-title"')[1].split("</section>")[0]
    text = html.unescape(re.sub(r"<[^>]+>", "", history))
    states = re.findall(r"Release of version \S+ is ([a-z ]+)\s", text)
    assert [state.strip() for state in states] == ["rolled back", "canary", "gating", "gating", "pending"]
    assert "users complained" in text
    assert "canary.analysed" in text


def test_a_page_follows_its_lane(told: Story) -> None:
    topics = {project_topic(told.world.project.pk), lane_topic(told.lane.pk)}
    client = client_of(told)
    for name, args in (("lane", [told.lane.pk]), ("release", [told.flying.pk]), ("alerts", []), ("feedback", [])):
        assert set(client.get(reverse(name, args=args)).context["live_topics"]) == topics, name


def test_what_reads_many_rows_is_asked_for_later(told: Story) -> None:
    address = reverse("lane", args=[told.lane.pk])
    body = client_of(told).get(address).content.decode()
    for part in LAZY:
        part_address = reverse("lane_part", args=[told.lane.pk, part])
        assert f'data-lazy data-fragment="{part_address}"' in body
    assert "Would train on" not in body
    assert body.count('<noscript><a href="?whole">') == len(LAZY)
    assert "data-lazy" not in client_of(told).get(address + "?whole").content.decode()


def test_moving_parts_are_rendered_alone(told: Story) -> None:
    client = client_of(told)
    for address in (
        reverse("lanes"),
        reverse("feedback"),
        reverse("alerts"),
        reverse("release", args=[told.flying.pk]),
    ):
        part = client.get(address, headers={"X-Slipway-Fragment": "1"})
        assert "<html" not in part.content.decode(), address
        assert "<section" in part.content.decode(), address
    for part in PARTS:
        body = client.get(reverse("lane_part", args=[told.lane.pk, part])).content.decode()
        assert "<html" not in body, part
    assert client.get(reverse("lane_part", args=[told.lane.pk, "nothing"])).status_code == 404


FORBIDDEN = {
    MemberRole.VIEWER: {"pause", "promote", "rollback", "resolve", "cadence", "signal_map", "switch"},
    MemberRole.REVIEWER: {"pause", "cadence", "switch"},
    MemberRole.ENGINEER: set(),
    MemberRole.OWNER: set(),
}


@pytest.mark.parametrize("role", list(MemberRole))
def test_roles_open_what_their_permissions_say(told: Story, role: MemberRole) -> None:
    client, lane, release, alert = client_of(told, role), told.lane, told.flying, told.alert
    assert release is not None
    assert alert is not None
    source = FeedbackSource.objects.get(project=told.world.project)
    acts = {
        "pause": reverse("lane_act", args=[lane.pk, "pause"]),
        "promote": reverse("release_control", args=[release.pk, "promote"]),
        "rollback": reverse("release_control", args=[release.pk, "rollback"]),
        "resolve": reverse("alert_resolve", args=[alert.pk]),
        "cadence": reverse("lane_cadence", args=[lane.pk]),
        "signal_map": reverse("signal_map"),
        "switch": reverse("source_switch", args=[source.pk]),
    }
    answers = {name: client.get(address).status_code for name, address in acts.items()}
    assert answers == {name: 403 if name in FORBIDDEN[role] else 200 for name in acts}
    body = client.get(reverse("lane", args=[lane.pk])).content.decode()
    for name in ("pause", "promote", "rollback", "resolve"):
        linked = re.search(re.escape(acts[name]) + r'[^"]*" data-act', body) is not None
        assert linked == (name not in FORBIDDEN[role]), name


@pytest.mark.parametrize("role", [MemberRole.OWNER, MemberRole.VIEWER])
def test_an_empty_lane_says_what_to_do(role: MemberRole) -> None:
    story = empty_lane()
    client = client_of(story, role)
    for part in PARTS:
        assert client.get(reverse("lane_part", args=[story.lane.pk, part])).status_code == 200, part
    for name in ("lanes", "feedback", "alerts", "sources", "home"):
        assert client.get(reverse(name)).status_code == 200, name
    body = client.get(reverse("lane", args=[story.lane.pk]) + "?whole").content.decode()
    for shown in ("No slot yet", "No release yet", "Nothing to compare yet", "no cadence is set", "by hand"):
        assert shown in body, shown


def curl_of(body: str, client: Client, key: str, scope_path: str) -> int:
    """Run the page's curl as it stands; its status."""
    text = next(text for text in re.findall(r"<pre[^>]*>(.*?)</pre>", body, re.DOTALL) if scope_path in text)
    words = shlex.split(html.unescape(text).replace("\\\n", " "))
    address = next(word for word in words if word.startswith("http://testserver/"))
    response = client.post(
        address.removeprefix("http://testserver"),
        data=words[words.index("-d") + 1],
        content_type="application/json",
        headers={"Authorization": f"Bearer {key}"},
    )
    return response.status_code


def test_the_curls_of_empty_pages_work_as_they_stand() -> None:
    story = empty_lane()
    client, lane = client_of(story), story.lane
    _, key = api_key_create(
        project=story.world.project,
        name="k",
        scopes=[Scope.RELEASES, Scope.RUBRICS],
        actor=SYSTEM,
        created_by=story.workspace.owner,
    )
    slots = reverse("lane_part", args=[lane.pk, "slots"])
    assert curl_of(client.get(slots).content.decode(), Client(), key, "/cadence") == 200
    assert story.lane.cadence["interval_s"] == 18000
    assert curl_of(client.get(slots).content.decode(), Client(), key, "/run-now") in (200, 202)
    assert story.lane.cadence_slots.count() == 1
    assert curl_of(client.get(reverse("alerts")).content.decode(), Client(), key, "/alert-hooks") == 201
    assert curl_of(client.get(reverse("sources")).content.decode(), Client(), key, "/sources") == 201


def test_the_badge_counts_open_alerts(told: Story) -> None:
    assert client_of(told).get(reverse("alerts_badge")).content.decode().startswith('<span class="badge">1<')
    assert "badge" not in client_of(empty_lane()).get(reverse("alerts_badge")).content.decode()
    home = client_of(told).get(reverse("home")).content.decode()
    assert "1 thing to look at" in home
    assert "It holds its lane" in home
