"""Every page, full and empty, for every role: it answers, escapes, and asks the database no more for more rows."""

from __future__ import annotations

import random

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.models import RubricVersion, TaskSet
from controlplane.states import MemberRole
from tests.factories import Workspace, make_workspace
from tests.playing import play_step, publish_step

pytestmark = pytest.mark.django_db

LISTS = (
    "home",
    "home_part",
    "runs",
    "rollouts",
    "clusters",
    "task_sets",
    "environments",
    "rubrics",
    "events",
    "work",
    "members",
)


def client_of(workspace: Workspace, role: MemberRole = MemberRole.OWNER) -> Client:
    client = Client()
    client.force_login(workspace.people[role.value])
    return client


@pytest.mark.parametrize("name", LISTS)
def test_lists_without_rows_say_what_to_do(name: str) -> None:
    response = client_of(make_workspace()).get(reverse(name))
    assert response.status_code == 200


def addresses(run) -> list[str]:
    rollout = run.groups.order_by("position").first().rollouts.first()
    unit = run.work.filter(state="dead").get()
    task_set = TaskSet.objects.get(project=run.project)
    rubric = RubricVersion.objects.get(rubric__project=run.project).rubric
    return [
        *(reverse(name) for name in LISTS),
        reverse("run", args=[run.pk]),
        *(reverse("run_part", args=[run.pk, part]) for part in ("status", "steps", "events", "timeline", "controls")),
        reverse("run_control", args=[run.pk, "pause"]),
        reverse("run_fork", args=[run.pk]),
        reverse("run_compare") + f"?a={run.pk}&b={run.pk}",
        reverse("run_new"),
        reverse("run_new") + f"?like={run.pk}",
        reverse("rollout", args=[rollout.pk]),
        reverse("rollouts") + f"?run={run.pk}&step=1&split=train&reward_from=0&reward_to=1&order=best",
        reverse("work_unit", args=[unit.pk]),
        reverse("work_replay", args=[unit.pk]),
        reverse("work") + "?state=",
        reverse("task_set", args=[task_set.pk]),
        reverse("task_set", args=[task_set.pk]) + "?split=heldout&order=hardest",
        reverse("task", args=[rollout.group.task_id]),
        reverse("environment", args=[task_set.environment]),
        reverse("rubric", args=[rubric.slug]),
        reverse("rubric_edit", args=[rubric.slug]),
        reverse("rubric_new"),
        reverse("keys"),
    ]


def test_every_page_answers_and_escapes_what_others_wrote(played) -> None:
    workspace, run = played
    client = client_of(workspace)
    for address in addresses(run):
        response = client.get(address)
        assert response.status_code == 200, address
        body = response.content.decode()
        assert "<script>alert" not in body, address
        assert "<b onmouseover" not in body, address
        assert "\x1b" not in body, address
        if "<form" in body or "<option" in body:
            continue  # a field gives back what was written, byte by byte; the browser shows it as text
        assert "\u202e" not in body, address


def test_pages_hold_no_inline_script_and_name_nothing_outside(played) -> None:
    workspace, run = played
    client = client_of(workspace)
    for address in addresses(run):
        response = client.get(address)
        body = response.content.decode()
        assert "<script>" not in body, address
        for forbidden in (" onclick=", " onload=", "javascript:", 'src="http', 'href="http', "//cdn"):
            assert forbidden not in body, address
        policy = response.headers["Content-Security-Policy"]
        assert "script-src 'self';" in policy + ";"
        assert "unsafe-eval" not in policy


def test_a_stranger_is_sent_to_the_login_page_and_back(played) -> None:
    _, run = played
    for address in addresses(run):
        response = Client().get(address)
        assert response.status_code == 302, address
        assert response.headers["Location"].startswith("/login/?next="), address


def test_a_member_of_another_project_sees_nothing(played) -> None:
    _, run = played
    other = client_of(make_workspace())
    rollout = run.groups.first().rollouts.first()
    unit = run.work.first()
    for name, key in (("run", run.pk), ("run_series", run.pk), ("rollout", rollout.pk), ("work_unit", unit.pk)):
        assert other.get(reverse(name, args=[key])).status_code == 404, name
    assert other.post(reverse("run_control", args=[run.pk, "stop"]), {"reason": "mine"}).status_code == 404
    body = other.get(reverse("rollouts")).content.decode() + other.get(reverse("events")).content.decode()
    assert str(run.pk) not in body


FORBIDDEN = {
    MemberRole.VIEWER: ("pause", "fork", "replay", "run_new", "rubric_new", "keys"),
    MemberRole.REVIEWER: ("pause", "fork", "replay", "run_new", "keys"),
    MemberRole.ENGINEER: ("keys",),
    MemberRole.OWNER: (),
}


@pytest.mark.parametrize("role", list(MemberRole))
def test_roles_open_what_their_permissions_say(played, role: MemberRole) -> None:
    workspace, run = played
    unit = run.work.filter(state="dead").get()
    client = client_of(workspace, role)
    addresses = {
        "pause": reverse("run_control", args=[run.pk, "pause"]),
        "fork": reverse("run_fork", args=[run.pk]),
        "replay": reverse("work_replay", args=[unit.pk]),
        "run_new": reverse("run_new"),
        "rubric_new": reverse("rubric_new"),
        "keys": reverse("keys"),
    }
    answers = {name: client.get(address).status_code for name, address in addresses.items()}
    assert answers == {name: 403 if name in FORBIDDEN[role] else 200 for name in addresses}


def test_queries_do_not_grow_with_rows(played) -> None:
    workspace, run = played
    client = client_of(workspace)

    def counts() -> dict[str, int]:
        found = {}
        for address in addresses(run):
            with CaptureQueriesContext(connection) as queries:
                client.get(address)
            found[address] = len(queries)
        return found

    before = counts()
    publish_step(run.steps.get(version=None), skill=0.5, luck=random.Random(5))
    play_step(run, skill=0.5, luck=random.Random(5))
    after = counts()
    assert {address: count for address, count in after.items() if count > before[address]} == {}
