"""Pages of task sets, tasks and environments: files are stored or refused with their lines, signs and proofs shown."""

import json

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse

from controlplane.models import Alert, Rollout, RolloutGroup, RolloutWatch, TaskSet, TaskSetProof, TaskTally
from controlplane.states import AlertKind, MemberRole, ProofState
from tests.factories import HOSTILE, make_workspace

pytestmark = pytest.mark.django_db


def client_of(workspace, role=MemberRole.OWNER) -> Client:
    client = Client()
    client.force_login(workspace.people[role.value])
    return client


def tasks(*keys) -> str:
    rows = [
        {"id": key, "split": "heldout" if key[0] == "h" else "train", "input": {"question": key}, "reference": {}}
        for key in keys
    ]
    return "\n".join(json.dumps(row) for row in rows)


def send(client, text, *, slug="mine", name="tasks.jsonl", environment="word-problems"):
    file = SimpleUploadedFile(name, text.encode() if isinstance(text, str) else text)
    return client.post(reverse("task_sets"), {"slug": slug, "environment": environment, "file": file})


def test_a_file_becomes_the_next_version_and_the_page_lists_both():
    workspace = make_workspace()
    client = client_of(workspace)
    first = send(client, tasks("a", "h"))
    assert first.status_code == 302
    second = client.get(send(client, tasks("a", "b", "h")).headers["Location"]).content.decode()
    assert "version 1</a>" in second
    assert "version 2</a>" in second
    assert [row.version for row in TaskSet.objects.order_by("version")] == [1, 2]


@pytest.mark.parametrize(
    ("text", "values", "said"),
    [
        (tasks("a", "h") + '\n{"id": "<b onmouseover=1>"}', {}, "line 3: "),
        (b"PAR1", {"name": "t.parquet"}, "arquet"),
        (tasks("a", "h"), {"slug": "a b"}, "a name of letters"),
        (tasks("a", "h"), {"environment": "mars"}, "there is no such environment"),
    ],
)
def test_a_file_that_is_refused_says_why_and_stores_nothing(text, values, said):
    workspace = make_workspace()
    response = send(client_of(workspace), text, **values)
    body = response.content.decode()
    assert response.status_code == 422
    assert said in body
    assert "<b onmouseover" not in body
    assert not TaskSet.objects.exists()


def test_no_file_is_said_and_viewers_store_nothing():
    workspace = make_workspace()
    response = client_of(workspace).post(reverse("task_sets"), {"slug": "x", "environment": "word-problems"})
    assert "choose a file" in response.content.decode()
    viewer = client_of(workspace, MemberRole.VIEWER)
    assert send(viewer, tasks("a", "h")).status_code == 403
    assert "Check and store" not in viewer.get(reverse("task_sets")).content.decode()


def test_a_set_shows_its_proof_and_how_hard_its_tasks_are(played):
    workspace, run = played
    client = client_of(workspace)
    task_set = TaskSet.objects.get(project=run.project)
    address = reverse("task_set", args=[task_set.pk])
    assert "Not proven here" in client.get(address).content.decode()
    finding = {"task": HOSTILE, "verdict": "passes_before", "detail": HOSTILE}
    TaskSetProof.objects.create(task_set=task_set, state=ProofState.REFUSED, checked=3, findings=[finding])
    body = client.get(address).content.decode()
    assert "passes before" in body
    assert "No run starts with this version" in body
    assert "<script>alert" not in body
    assert "attempts</span>" in body
    tried = TaskTally.objects.filter(task__task_set=task_set, task__split="train").values("task").distinct().count()
    assert tried > 0
    assert f"{tried} of {task_set.train_count} tasks tried" in body
    hardest = client.get(address + "?order=hardest").context["tasks"]
    easiest = client.get(address + "?order=easiest").context["tasks"]
    means = {
        name: [row.known.mean for row in rows if row.attempts] for name, rows in (("up", hardest), ("down", easiest))
    }
    assert len(set(means["up"])) > 1
    assert means["up"] == sorted(means["up"])
    assert means["down"] == sorted(means["down"], reverse=True)
    assert all(row.attempts for row in hardest[: len(means["up"])]), "what was never tried comes last"


def test_a_task_shows_its_attempts_over_versions_and_their_signs(played):
    workspace, run = played
    rollout = Rollout.objects.filter(group__run=run, state="scored").first()
    RolloutWatch.objects.create(
        rollout=rollout, environment="word-problems", version=rollout.newest_version, tokens=9, tool_calls=2,
        tool_errors=1, no_edit=None, refusal=False, gap=None, impossible_passed=None, tests_touched=True,
        special_cased=False, early_exit=False, tampering=False,
    )  # fmt: skip
    client = client_of(workspace)
    body = client.get(reverse("task", args=[rollout.group.task_id])).content.decode()
    assert reverse("rollout", args=[rollout.pk]) in body
    assert "tests touched" in body
    assert "Over policy versions" in body
    environment = client.get(reverse("environment", args=["word-problems"]))
    (row,) = environment.context["watch"].versions
    assert row.rollouts == 1
    assert "100.0" in environment.content.decode()
    assert "Nothing to compare" in environment.content.decode()


def test_an_environment_shows_its_open_alert_and_unknown_ones_are_not_there():
    workspace = make_workspace()
    detail = {"environment": "word-problems", "sign": "tests_touched", "reason": HOSTILE}
    Alert.objects.create(project=workspace.project, kind=AlertKind.CHEATING, subject="x", detail=detail)
    client = client_of(workspace)
    body = client.get(reverse("environment", args=["word-problems"])).content.decode()
    assert "tests touched rose" in body
    assert "<script>alert" not in body
    assert "rose" not in client.get(reverse("environment", args=["code-repair"])).content.decode()
    assert client.get(reverse("environment", args=["mars"])).status_code == 404


def test_a_task_of_another_project_is_not_there(played):
    _, run = played
    task = TaskSet.objects.get(project=run.project).tasks.first()
    assert client_of(make_workspace()).get(reverse("task", args=[task.pk])).status_code == 404


def test_a_run_shows_which_groups_were_voided_and_what_becomes_of_their_tasks(played):
    workspace, run = played
    group = run.groups.filter(stage__isnull=False, state="consumed").first()
    assert "Voided groups" not in client_of(workspace).get(reverse("run", args=[run.pk])).content.decode()
    RolloutGroup.objects.filter(pk=group.pk).update(state="voided", reason=HOSTILE)
    body = client_of(workspace).get(reverse("run_part", args=[run.pk, "status"])).content.decode()
    assert "Voided groups" in body
    assert "comes back" in body
    assert "<script>alert" not in body
