"""Acts of the clusters and version pages and their twins of the API: refused to whoever may not, and then not done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from rest_framework.test import APIClient

from controlplane.models import Event, Replica
from controlplane.permissions import ROLES, Action, allowed
from controlplane.services.events import SYSTEM
from controlplane.services.steering import replica_pin
from controlplane.services.tenancy import api_key_create
from controlplane.states import MemberRole, Scope, WeightSlot
from frontend.views.fleet_acts import VERBS
from tests.controlplane.api.api_factories import make_export
from tests.factories import make_workspace
from tests.fleet_story import FleetStory, fleet_story
from tests.lending_rows import ALWAYS

pytestmark = pytest.mark.django_db


@dataclass(frozen=True)
class Deed:
    """An act that would be done if it were permitted: on a page, and over the API."""

    name: str
    action: Action
    page: str
    form: dict[str, str]
    path: str
    body: dict[str, Any]


def deeds(story: FleetStory) -> list[Deed]:
    """All of them; each is possible in this story."""
    west = Replica.objects.get(cluster__slug="rollout-west", cluster__project=story.workspace.project)
    spare = story.serving.replicas.get(name="engine-2")
    gone, _ = Replica.objects.get_or_create(cluster=story.serving, name="gone")
    version, run, serving = str(story.head.pk), str(story.run.pk), story.serving
    replica_pin(
        replica=spare, slot=WeightSlot.DEFAULT, version=story.head, actor=SYSTEM, reason="so that it can be unpinned"
    )
    export = story.head.exports.first() or make_export(story.head)
    chosen: dict[str, tuple[Replica, dict[str, str]]] = {
        "pin": (west, {"slot": "default", "version": version}),
        "unpin": (spare, {"slot": "default"}),
        "drain": (west, {}),
        "undrain": (story.drained, {}),
        "repair": (west, {}),
        "forget": (gone, {}),
        "lend": (spare, {"run": run}),
        "return": (story.lent, {}),
    }
    assert chosen.keys() == VERBS.keys()
    found = [
        Deed(
            verb,
            Action.FLEET_CONTROL,
            reverse("replica_act", args=[replica.pk, verb]),
            fields,
            f"replicas/{replica.pk}/{verb}",
            fields,
        )
        for verb, (replica, fields) in chosen.items()
    ]
    policy = {"enabled": "on", "windows": "Sat 00:00-24:00", "timezone": "UTC", "source": "none", "lend_below": "0"}
    policy |= {"return_above": "0", "settle_s": "60", "window_s": "60", "prometheus_url": "", "prometheus_query": ""}
    policy |= {"keep": "1", "sessions": "4", "return_within_s": "90 s"}
    settings = {"capacity": "9", "bandwidth_mbit": "", "device": "", "devices": "1", "dollars_device_hour": ""}
    return [
        *found,
        Deed("allow lending", Action.FLEET_CONTROL, reverse("lending_allow"), {}, "lending", {"allowed": False}),
        Deed(
            "policy",
            Action.FLEET_CONTROL,
            reverse("lending_settings", args=[serving.pk]),
            policy,
            f"clusters/{serving.slug}/lending",
            {"spec": ALWAYS},
        ),
        Deed(
            "settings",
            Action.FLEET_CONTROL,
            reverse("cluster_settings", args=[serving.pk]),
            settings,
            f"clusters/{serving.slug}/configure",
            {"capacity": 9},
        ),
        Deed(
            "export",
            Action.WEIGHTS_EXPORT,
            reverse("version_export", args=[story.head.pk]),
            {"format": "nvfp4"},
            "exports",
            {"version": version, "format": "nvfp4"},
        ),
        Deed(
            "delete an export",
            Action.WEIGHTS_EXPORT,
            reverse("export_delete", args=[export.pk]),
            {},
            f"exports/{export.pk}/delete",
            {},
        ),
    ]


@pytest.fixture
def story() -> FleetStory:
    return fleet_story(steps=3)


def posted(client: Client, deed: Deed) -> int:
    return client.post(deed.page, {**deed.form, "reason": "because"}).status_code


def sent(client: APIClient, story: FleetStory, deed: Deed, *, below: str = "") -> int:
    """What the API answers, asked below the project of the story or another one."""
    path = f"/api/v1/projects/{below or story.workspace.project.slug}/{deed.path}"
    status: int = client.post(path, {**deed.body, "reason": "because"}, format="json").status_code
    return status


def none_is_done(story: FleetStory, attempt: Callable[[Deed], int], expected: int) -> None:
    """`attempt` gives `expected` for every deed, and the event log stays as it was."""
    everything = deeds(story)
    before = Event.objects.count()
    for deed in everything:
        assert attempt(deed) == expected, deed.name
        assert Event.objects.count() == before, deed.name


def page_client(user: Any = None, **options: Any) -> Client:
    client = Client(**options)
    if user is not None:
        client.force_login(user)
    return client


def api_client(user: Any = None, key: str = "", **options: Any) -> APIClient:
    client = APIClient(**options)
    if user is not None:
        client.force_login(user)
    if key:
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {key}")
    return client


def test_who_may_can_do_each_on_the_page(story: FleetStory) -> None:
    """So that the refusals below refuse something."""
    client = page_client(story.workspace.people["engineer"])
    for deed in deeds(story):
        before = Event.objects.count()
        assert posted(client, deed) == 302, deed.name
        assert Event.objects.count() > before, deed.name


def test_who_may_can_do_each_over_the_api(story: FleetStory) -> None:
    client = api_client(story.workspace.people["engineer"])
    for deed in deeds(story):
        before = Event.objects.count()
        assert sent(client, story, deed) in (200, 202), deed.name
        assert Event.objects.count() > before, deed.name


@pytest.mark.parametrize("role", [MemberRole.VIEWER, MemberRole.REVIEWER])
def test_roles_that_may_not_are_refused(story: FleetStory, role: MemberRole) -> None:
    user = story.workspace.people[role.value]
    assert role not in ROLES[Action.FLEET_CONTROL] | ROLES[Action.WEIGHTS_EXPORT]
    none_is_done(story, lambda deed: posted(page_client(user), deed), 403)
    none_is_done(story, lambda deed: sent(api_client(user), story, deed), 403)


def test_a_member_of_another_project_finds_nothing(story: FleetStory) -> None:
    stranger = make_workspace().owner
    none_is_done(story, lambda deed: sent(api_client(stranger), story, deed), 404)
    own = reverse("lending_allow")  # it is about the asker's own project, whichever that is
    none_is_done(story, lambda deed: 404 if deed.page == own else posted(page_client(stranger), deed), 404)


def test_nothing_of_another_project_is_found_below_ones_own(story: FleetStory) -> None:
    stranger = make_workspace()
    client, own = api_client(stranger.owner), ("lending", "exports")

    def attempt(deed: Deed) -> int:
        return 404 if deed.path in own else sent(client, story, deed, below=stranger.project.slug)

    none_is_done(story, attempt, 404)
    (export,) = (deed for deed in deeds(story) if deed.path == "exports")
    assert sent(client, story, export, below=stranger.project.slug) == 422  # it names a version of another project
    assert story.head.exports.count() == 1


def test_nobody_is_asked_to_log_in(story: FleetStory) -> None:
    none_is_done(story, lambda deed: posted(page_client(), deed), 302)
    none_is_done(story, lambda deed: sent(api_client(), story, deed), 401)


def test_a_key_acts_with_its_scope_alone(story: FleetStory) -> None:
    keys = {
        scope: api_key_create(project=story.workspace.project, name=scope, scopes=[scope], actor=SYSTEM)[1]
        for scope in Scope
    }
    everything = deeds(story)
    for deed in everything:
        for scope in Scope:
            before = Event.objects.count()
            may = allowed([scope.value], deed.action)
            status = sent(api_client(key=keys[scope]), story, deed)
            assert (status in (200, 202)) == may, (deed.name, scope, status)
            assert may or status == 403, (deed.name, scope, status)
            assert (Event.objects.count() > before) == may, (deed.name, scope)


def test_a_key_is_no_login_to_the_pages(story: FleetStory) -> None:
    _, key = api_key_create(project=story.workspace.project, name="all", scopes=list(Scope), actor=SYSTEM)
    headers = {"headers": {"Authorization": f"Bearer {key}"}}
    none_is_done(story, lambda deed: posted(page_client(**headers), deed), 302)


def test_a_session_needs_the_token_against_forged_requests(story: FleetStory) -> None:
    owner = story.workspace.people["owner"]
    none_is_done(story, lambda deed: posted(page_client(owner, enforce_csrf_checks=True), deed), 403)
    none_is_done(story, lambda deed: sent(api_client(owner, enforce_csrf_checks=True), story, deed), 403)


def test_looking_at_an_act_does_nothing(story: FleetStory) -> None:
    client = page_client(story.workspace.people["owner"])
    none_is_done(story, lambda deed: client.get(deed.page).status_code, 200)
