"""What people do on pages goes through services: with a reason, permitted, refused beside the field."""

from __future__ import annotations

import html
import json
import re
import shlex

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.models import ApiKey, Event, Membership, RubricVersion, Run, User, WorkUnit
from controlplane.services.catalog import task_set_create
from controlplane.services.events import SYSTEM
from controlplane.services.tenancy import api_key_authenticate, api_key_create
from controlplane.states import MemberRole, RunState, Scope, WorkState
from rl_core.environments.criteria import CRITERIA as KINDS
from rl_core.environments.criteria import WATCHED
from rl_core.environments.registry import ENVIRONMENTS
from tests.factories import PASSWORD, Workspace, furnish, make_workspace
from tests.playing import kill_unit, play, start_run

pytestmark = pytest.mark.django_db


@pytest.fixture
def workspace() -> Workspace:
    return furnish(make_workspace(), train=4, heldout=3)


def client_of(workspace: Workspace, role: MemberRole = MemberRole.OWNER) -> Client:
    client = Client()
    client.force_login(workspace.people[role.value])
    return client


def test_login_and_logout() -> None:
    workspace = make_workspace()
    client = Client()
    wrong = client.post(reverse("login"), {"username": workspace.owner.username, "password": "no"})
    assert "do not belong together" in wrong.content.decode()
    right = client.post(
        reverse("login") + "?next=/runs/",
        {"username": workspace.owner.username, "password": PASSWORD, "next": "/runs/"},
    )
    assert right.headers["Location"] == "/runs/"
    outside = client.post(
        reverse("login"), {"username": workspace.owner.username, "password": PASSWORD, "next": "https://evil.example/"}
    )
    assert outside.headers["Location"] == "/"
    assert client.get(reverse("logout")).status_code == 405
    client.post(reverse("logout"))
    assert client.get("/").status_code == 302


def test_who_has_no_project_is_told_what_to_do() -> None:
    client = Client()
    client.force_login(User.objects.create_user("loner"))
    assert "not a member of a project yet" in client.get("/").content.decode()


def test_switching_projects_changes_the_lists(workspace: Workspace) -> None:
    other = make_workspace(name="Zebra")
    Membership.objects.create(project=other.project, user=workspace.owner, role=MemberRole.VIEWER)
    client = client_of(workspace)
    assert workspace.project.name in client.get("/").content.decode()
    client.post(reverse("project_switch"), {"project": str(other.project.pk)})
    assert "<h1>Zebra</h1>" in client.get("/").content.decode()
    assert client.post(reverse("project_switch"), {"project": str(make_workspace().project.pk)}).status_code == 404


FORM = {
    "name": "From the page",
    "mode": "form",
    "model": "smollm2-135m",
    "task_set": "word-problems",
    "rubric": "word-problems",
    "seed": "4",
    "curriculum": "variance",
    "steps": "3",
    "prompts_per_step": "2",
    "group_size": "4",
    "learning_rate": "3e-5",
    "max_staleness": "1",
    "max_turns": "2",
    "max_tokens": "20",
    "max_context_tokens": "1024",
    "max_parallel_calls": "1",
    "compaction": "summarise",
    "eval_every": "0",
    "eval_tasks": "3",
    "clusters": ["rollout-west"],
}


def test_a_run_is_started_from_the_form(workspace: Workspace) -> None:
    client = client_of(workspace, MemberRole.ENGINEER)
    assert client.get(reverse("run_new")).status_code == 200
    response = client.post(reverse("run_new"), FORM)
    run = Run.objects.get(name="From the page")
    assert response.headers["Location"] == reverse("run", args=[run.pk])
    stage = run.spec["stages"][0]
    assert (stage["steps"], stage["group_size"], stage["optimizer"]["learning_rate"]) == (3, 4, 3e-5)
    assert (run.spec["seed"], run.spec["rollout_clusters"]) == (4, ["rollout-west"])
    assert (stage["curriculum"]["kind"], stage["compaction"]["kind"]) == ("variance", "summarise")
    assert run.created_by == workspace.people["engineer"]


def test_a_new_run_begins_with_what_the_environment_of_its_task_set_was_made_for(workspace: Workspace) -> None:
    slug = "bug-repair"
    tasks = ENVIRONMENTS[slug].build_task_set()
    task_set_create(project=workspace.project, slug=slug, environment=slug, tasks=tasks, actor=SYSTEM)
    form = client_of(workspace).get(reverse("run_new")).context["form"]
    names = ("task_set", "max_turns", "max_tokens", "max_context_tokens", "max_parallel_calls", "compaction")
    assert [form.values[name] for name in names] == ["bug-repair", "16", "400", "8192", "1", "none"]
    assert form.values["rubric"] == "word-problems", "there is no rubric of its name"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", " ", "Give the run a name"),
        ("steps", "0", "steps must be at least 1"),
        ("steps", "many", "Give a whole number"),
        ("group_size", "1", "group_size must be at least 2"),
        ("learning_rate", "7", "learning_rate must be in (0, 1)"),
        ("curriculum", "mars", "curriculum"),
        ("compaction", "mars", "compaction"),
        ("max_context_tokens", "10", "max_context_tokens must be at least 64"),
        ("seed", "-1", "seed must be in"),
        ("model", "gpt", "there is no model"),
        ("rubric", "none", "there is no published rubric"),
        ("clusters", "nowhere", "Choose at least one cluster"),
    ],
)
def test_what_is_wrong_is_said_beside_its_field(workspace: Workspace, field: str, value: str, message: str) -> None:
    response = client_of(workspace).post(reverse("run_new"), {**FORM, field: value})
    assert response.status_code == 422
    form = response.context["form"]
    assert message in " ".join(form.problems.by_field.get(field, []))
    assert not Run.objects.filter(name="From the page").exists()


def test_a_run_is_started_from_json_and_unknown_keys_are_refused(workspace: Workspace) -> None:
    client = client_of(workspace)
    spec = {"model": "smollm2-135m", "stages": [{"kind": "rl", "steps": 2}]}
    assert client.post(reverse("run_new"), {"name": "J", "mode": "json", "spec": json.dumps(spec)}).status_code == 302
    for text, message in (
        (json.dumps({**spec, "tempo": 1}), "tempo"),
        ("{", "not JSON"),
        ("[]", "an object"),
        ("[" * 100_000, "not JSON"),
    ):
        response = client.post(reverse("run_new"), {"name": "K", "mode": "json", "spec": text})
        assert response.status_code == 422
        assert message in " ".join(response.context["form"].problems.by_field["spec"])


def test_pause_resume_stop_take_a_reason_that_is_kept(workspace: Workspace) -> None:
    run = start_run(workspace)
    client = client_of(workspace, MemberRole.ENGINEER)
    without = client.post(reverse("run_control", args=[run.pk, "pause"]), {"reason": "  "})
    assert without.status_code == 409
    assert "Say why" in without.content.decode()
    for verb, state in (("pause", RunState.PAUSED), ("resume", RunState.RUNNING), ("stop", RunState.STOPPED)):
        response = client.post(reverse("run_control", args=[run.pk, verb]), {"reason": f"because {verb}"})
        assert response.status_code == 302, verb
        run.refresh_from_db()
        assert run.state == state
        event = Event.objects.filter(type="run.changed").latest("pk")
        assert (event.reason, event.actor) == (f"because {verb}", workspace.people["engineer"].username)
    again = client.post(reverse("run_control", args=[run.pk, "resume"]), {"reason": "again"})
    assert again.status_code == 409
    assert "cannot become running" in again.content.decode()


def test_a_viewer_changes_nothing(workspace: Workspace) -> None:
    run = start_run(workspace)
    client = client_of(workspace, MemberRole.VIEWER)
    assert client.post(reverse("run_control", args=[run.pk, "stop"]), {"reason": "mine"}).status_code == 403
    assert client.post(reverse("run_new"), FORM).status_code == 403
    assert client.post(reverse("members"), {"act": "create", "username": "x"}).status_code == 403
    run.refresh_from_db()
    assert run.state == RunState.RUNNING
    body = client.get(reverse("run", args=[run.pk])).content.decode()
    assert "data-act" not in body


def test_a_run_is_forked_at_a_step(workspace: Workspace) -> None:
    run = play(start_run(workspace, steps=2), 1)
    client = client_of(workspace)
    address = reverse("run_fork", args=[run.pk])
    broken = client.post(address, {"name": "F", "step_number": "1", "overrides": "{"})
    assert broken.status_code == 422
    absent = client.post(address, {"name": "F", "step_number": "9", "overrides": ""})
    assert absent.status_code == 422
    assert "no published step 9" in absent.content.decode()
    response = client.post(address, {"name": "F", "step_number": "1", "overrides": '{"seed": 9}'})
    fork = Run.objects.get(name="F")
    assert response.headers["Location"] == reverse("run", args=[fork.pk])
    assert fork.spec["seed"] == 9
    assert fork.lineage.parent == run.steps.get(number=1).version
    assert "forked from" in client.get(reverse("run", args=[fork.pk])).content.decode()


def test_a_dead_letter_is_replayed(workspace: Workspace) -> None:
    unit = kill_unit(start_run(workspace))
    client = client_of(workspace)
    assert str(unit.pk) in client.get(reverse("work")).content.decode()
    assert client.post(reverse("work_replay", args=[unit.pk]), {"reason": "disk freed"}).status_code == 302
    assert WorkUnit.objects.get(pk=unit.pk).state == WorkState.QUEUED
    assert client.post(reverse("work_replay", args=[unit.pk]), {"reason": "again"}).status_code == 409


CRITERIA = {
    "key": ["ran", "short"],
    "text": ["The tool ran", "Short enough"],
    "kind": ["tool_ran", "max_length"],
    "weight": ["3", "1"],
    "tier": ["essential", "optional"],
    "params": ["", '{"limit": 100}'],
}


def test_every_kind_of_criterion_is_explained_where_a_rubric_is_written(workspace: Workspace) -> None:
    page = client_of(workspace).get(reverse("rubric_new")).content.decode()
    for kind, row in KINDS.items():
        explained = page.partition(f'<th scope="row" class="mono">{kind.value}</th>')[2].partition("</tr>")[0]
        assert "data-label" in explained, kind
        assert all(f"{name} " in explained for name in row.params.__struct_fields__), kind
        assert ("its weight must be 0" in explained) == (kind in WATCHED)
    assert "url (required)<br>model (required)<br>secret = &quot;&quot;" in page


def test_a_rubric_version_is_published_and_never_changed(workspace: Workspace) -> None:
    client = client_of(workspace, MemberRole.REVIEWER)
    params = _max_length_params()
    data = {**CRITERIA, "params": ["", params], "note": "shorter"}
    response = client.post(reverse("rubric_edit", args=["word-problems"]), data)
    assert response.status_code == 302, response.content.decode()[-2000:]
    versions = RubricVersion.objects.filter(rubric__slug="word-problems").order_by("number")
    assert [version.number for version in versions] == [1, 2]
    assert versions[1].author == workspace.people["reviewer"]
    body = client.get(reverse("rubric", args=["word-problems"])).content.decode()
    assert "75 %" in body
    assert "25 %" in body
    client.post(reverse("rubric_edit", args=["word-problems"]), data)
    assert versions.count() == 2


def _max_length_params() -> str:
    from rl_core.environments.criteria import CRITERIA as TABLE
    from rl_core.environments.criteria import CriterionKind

    names = TABLE[CriterionKind.MAX_LENGTH].params.__struct_fields__
    return json.dumps({names[0]: 100})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": ["x", "1"]}, "the weight is not a number"),
        ({"params": ["{", ""]}, "the parameters are not JSON"),
        ({"kind": ["vibes", "tool_ran"]}, "the kind is not known"),
        ({"weight": ["0", "0"], "params": ["", "{}"]}, "rewards nothing"),
        ({"key": ["Ran!", "short"]}, "lower-case letters"),
    ],
)
def test_a_rubric_that_is_none_is_refused(workspace: Workspace, change: dict, message: str) -> None:
    data = {**CRITERIA, "kind": ["tool_ran", "tool_ran"], "params": ["", ""], "slug": "new-one", **change}
    response = client_of(workspace).post(reverse("rubric_new"), data)
    assert response.status_code == 422
    assert message in response.content.decode()
    assert not RubricVersion.objects.filter(rubric__slug="new-one").exists()


def test_a_key_is_shown_once_and_works_until_it_is_revoked(workspace: Workspace) -> None:
    client = client_of(workspace)
    response = client.post(reverse("keys"), {"name": "ci", "scopes": ["read", "runs"], "days": "30"})
    secret = re.search(r'id="secret">(slw_[^<]+)<', response.content.decode())[1]
    assert "no-store" in response.headers["Cache-Control"]
    key = ApiKey.objects.get(name="ci")
    assert api_key_authenticate(token=secret) == key
    assert secret not in client.get(reverse("keys")).content.decode()
    assert client.post(reverse("keys"), {"name": "", "scopes": []}).status_code == 422
    client.post(reverse("key_revoke", args=[key.pk]), {"reason": "leaked"})
    assert api_key_authenticate(token=secret) is None


def test_members_are_added_changed_and_removed(workspace: Workspace) -> None:
    client = client_of(workspace)
    data = {"act": "create", "username": "nova", "password": PASSWORD, "role": "reviewer"}
    assert client.post(reverse("members"), data).status_code == 302
    member = Membership.objects.get(user__username="nova")
    assert member.role == MemberRole.REVIEWER
    weak = client.post(reverse("members"), {**data, "username": "weak", "password": "1"})
    assert weak.status_code == 422
    client.post(reverse("members"), {"act": "change", "membership": str(member.pk), "role": "engineer"})
    member.refresh_from_db()
    assert member.role == MemberRole.ENGINEER
    client.post(reverse("members"), {"act": "remove", "membership": str(member.pk)})
    assert not Membership.objects.filter(pk=member.pk).exists()
    owner = Membership.objects.get(user=workspace.owner)
    last = client.post(reverse("members"), {"act": "remove", "membership": str(owner.pk)})
    assert last.status_code == 422
    assert "last owner" in last.content.decode()


@pytest.mark.parametrize("name", ["home", "runs", "task_sets"])
def test_the_curl_of_an_empty_page_works_as_it_stands(workspace: Workspace, name: str) -> None:
    if name == "task_sets":
        workspace = make_workspace()
    page = client_of(workspace).get(reverse(name)).content.decode()
    command = shlex.split(html.unescape(re.search(r'<pre id="first-curl">(.*?)</pre>', page, re.DOTALL)[1]))
    address = next(word for word in command if word.startswith("http://testserver/"))
    _, secret = api_key_create(
        project=workspace.project, name="k", scopes=[Scope.RUNS], actor=SYSTEM, created_by=workspace.owner
    )
    response = Client().post(
        address.removeprefix("http://testserver"),
        data=command[command.index("-d") + 1],
        content_type="application/json",
        headers={"Authorization": f"Bearer {secret}"},
    )
    assert response.status_code == 201, response.content.decode()
