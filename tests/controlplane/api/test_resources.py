"""What the endpoints answer."""

from __future__ import annotations

import json
import math
import uuid

import pytest
from django.utils import timezone

from controlplane.models import Event, MetricPoint, ReplicaSlot, Rollout, RolloutWatch, Run, Task, TaskSet, WorkUnit
from controlplane.services.observations import rollout_note
from controlplane.states import ActorKind, RunState, WorkState
from rl_core.specs import parse_run_spec
from rl_core.store import open_store
from tests.controlplane.api.api_factories import (
    CRITERIA,
    TASKS,
    client_of,
    make_key,
    make_project,
    make_run,
    make_user,
    make_world,
    run_body,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def world():
    return make_world()


@pytest.fixture
def client(world):
    return client_of(make_user(world.project))


def test_every_list_shows_what_the_detail_shows(world, client) -> None:
    by_id = [
        "task-sets",
        "replicas",
        "versions",
        "transfers",
        "runs",
        "evaluations",
        "groups",
        "rollouts",
        "work",
        "attempts",
    ]
    for resource in [*by_id, "models", "rubrics", "clusters"]:
        rows = client.get(f"{world.base}/{resource}").json()["results"]
        assert rows, resource
        name = rows[0]["id"] if resource in by_id else rows[0]["slug"]
        assert client.get(f"{world.base}/{resource}/{name}").json() == rows[0], resource


def test_details_show_what_the_database_holds(world, client) -> None:
    run = client.get(f"{world.base}/runs/{world.run.pk}").json()
    assert (run["state"], run["model"], run["published_steps"]) == ("running", "tiny", 1)
    assert run["head"]["ref"] == f"{world.run.lineage_id}:0-0"
    assert run["topic"] == f"run:{world.run.pk}"
    step = client.get(f"{world.base}/runs/{world.run.pk}/steps/1").json()
    assert (step["number"], step["version"]["number"], step["base_version"]["number"]) == (1, 1, 0)
    replica = client.get(f"{world.base}/replicas/{world.replica.pk}").json()
    assert replica["slots"][0]["current_version"]["id"] == str(world.version.pk)
    assert replica["slots"][0]["desired_version"] is None
    rollout = client.get(f"{world.base}/rollouts/{world.rollout.pk}").json()
    assert (rollout["replica"], rollout["scores"][0]["value"]) == ("r0", 1.0)
    version = client.get(f"{world.base}/versions/{world.version.pk}").json()
    assert version["run"] == str(world.run.pk)
    assert "folder" not in client.get(f"{world.base}/models/tiny").json()


def test_a_trajectory_is_shown_token_by_token(world, client) -> None:
    body = client.get(f"{world.base}/rollouts/{world.rollout.pk}/trajectory").json()
    segment = body["segments"][0]
    assert segment["token_ids"] == [1, 2, 3, 4]
    assert segment["logprobs"] == [0.0, 0.0, -0.5, -0.25]
    assert segment["spans"] == [{"start": 2, "end": 4, "version": "l:0-0"}]
    assert segment["routes"] == {"tokens": 3, "layers": 1, "top_k": 1, "dtype": "uint8"}
    assert body["messages"][1]["content"] == "<script>4</script>"
    assert body["tool_calls"][0]["result"] == "4"
    assert (body["ending"], body["artifacts"]) == ("terminated", {"candidate": "x"})


def test_a_trajectory_that_is_missing_or_damaged_says_so(world, client, settings, tmp_path) -> None:
    settings.STORE_URL = tmp_path.as_uri()
    path = f"{world.base}/rollouts/{world.rollout.pk}/trajectory"
    world.rollout.trajectory_key = ""
    world.rollout.save()
    assert client.get(path).status_code == 404
    world.rollout.trajectory_key = "blobs/aa/" + "a" * 64
    world.rollout.save()
    gone = client.get(path)
    assert (gone.status_code, gone.json()["code"]) == (404, "object_missing")
    world.rollout.trajectory_key = open_store(tmp_path).put_blob(b"it was something else once")
    world.rollout.save()
    (tmp_path / world.rollout.trajectory_key).write_bytes(b"and is this now")
    damaged = client.get(path)
    assert (damaged.status_code, damaged.json()["code"]) == (503, "digest_mismatch")


def test_environments_are_those_of_this_build(world, client) -> None:
    rows = client.get(f"{world.base}/environments").json()
    assert "word-problems" in {row["slug"] for row in rows}
    assert client.get(f"{world.base}/environments/word-problems").json() in rows
    assert client.get(f"{world.base}/environments/none").status_code == 404


def test_a_run_is_created_resolved_and_its_schema_is_served(world, client) -> None:
    answer = client.post(f"{world.base}/runs", run_body(world, steps=3), format="json")
    assert answer.status_code == 201, answer.content
    body = answer.json()
    assert (body["state"], body["spec"]["stages"][0]["steps"]) == ("pending", 3)
    assert body["spec"]["stages"][0]["group_size"] == 8
    parse_run_spec(body["spec"])
    created = Event.objects.get(type="run.created")
    assert created.actor_kind == ActorKind.USER
    schema = client.get(f"{world.base}/runs/spec-schema").json()
    assert "RunSpec" in json.dumps(schema)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"colour": 1}, "colour"),
        ({"steps": 0}, "steps"),
        ({"steps": "three"}, "steps"),
        ({"task_set": "none"}, "none"),
        ({"environment": "mars"}, "mars"),
        ({"sampling": {"top_p": 0.5}}, "untruncated"),
    ],
)
def test_a_bad_spec_is_422_and_named(world, client, change, fragment: str) -> None:
    answer = client.post(f"{world.base}/runs", run_body(world, **change), format="json")
    assert answer.status_code == 422, answer.content
    assert answer.json()["field"].startswith("spec")
    assert fragment in answer.json()["detail"]
    assert Run.objects.count() == 1


def test_runs_are_paused_resumed_and_stopped_and_what_is_illegal_is_409(world, client) -> None:
    path = f"{world.base}/runs/{world.run.pk}"
    steps = [("resume", 409), ("pause", 200), ("pause", 409), ("resume", 200), ("stop", 200), ("resume", 409)]
    for verb, status in steps:
        answer = client.post(f"{path}/{verb}", {"reason": f"because of {verb}"}, format="json")
        assert answer.status_code == status, (verb, answer.content)
        if status == 409:
            assert answer.json()["code"] == "illegal_transition"
    assert client.get(path).json()["state"] == "stopped"
    reasons = list(Event.objects.filter(type="run.changed").order_by("seq").values_list("reason", "actor_kind"))
    assert [reason for reason, _ in reasons] == ["because of pause", "because of resume", "because of stop"]
    assert {kind for _, kind in reasons} == {"user"}


def test_a_run_is_forked_from_a_step(world, client) -> None:
    path = f"{world.base}/runs/{world.run.pk}/fork"
    body = {"name": "fork", "step_number": 1, "overrides": {**run_body(world)["spec"], "seed": 7}}
    answer = client.post(path, body, format="json")
    assert answer.status_code == 201, answer.content
    assert answer.json()["parent_version"]["number"] == 1
    assert answer.json()["spec"]["seed"] == 7
    assert client.post(path, {**body, "step_number": 9}, format="json").status_code == 404


def test_a_file_of_tasks_is_stored_or_refused_as_a_whole(world, client) -> None:
    path = f"{world.base}/task-sets/file?slug=filed&environment=word-problems"
    text = "\n".join(json.dumps(task) for task in TASKS)
    made = client.post(path, text, content_type="application/x-ndjson", headers={"Idempotency-Key": "one"})
    assert (made.status_code, made.json()["version"]) == (201, 1)
    again = client.post(path, text, content_type="application/x-ndjson", headers={"Idempotency-Key": "one"})
    assert (again.json()["id"], again.headers["Idempotency-Replayed"]) == (made.json()["id"], "true")
    other = client.post(path, text + "\n", content_type="application/x-ndjson", headers={"Idempotency-Key": "one"})
    assert other.json()["code"] == "idempotency_key_reused"
    broken = client.post(path, text + "\n{", content_type="application/x-ndjson")
    assert (broken.status_code, broken.json()["field"]) == (422, "tasks")
    assert f"line {len(TASKS) + 1}: " in broken.json()["detail"]
    no_table = client.post(path, b"PAR1", content_type="application/vnd.apache.parquet")
    assert no_table.status_code in (422, 503)
    assert client.post(path, {"slug": "x"}, format="json").status_code == 415
    assert client.post(path.replace("slug=filed&", ""), text, content_type="application/x-ndjson").status_code == 422
    rows = client.get(f"{world.base}/task-sets?slug=filed").json()["results"]
    assert [row["version"] for row in rows] == [1]
    report = client.get(f"{world.base}/task-sets/{made.json()['id']}/report").json()
    assert (report["proof"], report["findings"], report["tried"], sum(report["histogram"])) == (None, [], 0, 0)


def test_a_task_has_a_history_and_its_environment_a_watch(world, client) -> None:
    for reward in (1.0, 0.5):
        rollout = Rollout(reward=reward, group=world.group, newest_version=world.version)
        rollout_note(group=world.group, rollout=rollout, values={}, signs=None)
    RolloutWatch.objects.create(
        rollout=world.rollout, environment="word-problems", version=world.version, tokens=9, tool_calls=2,
        tool_errors=1, no_edit=None, refusal=False, gap=0.25, impossible_passed=None, tests_touched=True,
        special_cased=False, early_exit=False, tampering=False,
    )  # fmt: skip
    history = client.get(f"{world.base}/tasks/{world.group.task_id}/history").json()
    assert (history["attempts"], history["passes"], history["mean"]) == (2, 1, 0.625)
    (row,) = history["versions"]
    assert (row["version"], row["run"], row["mean_reward"]) == (str(world.version.ref), str(world.run.pk), 0.75)
    report = client.get(f"{world.base}/task-sets/{world.task_set.pk}/report").json()
    assert (report["tried"], report["attempts"], report["histogram"][7]) == (1, 2, 1)
    watch = client.get(f"{world.base}/environments/word-problems/watch").json()
    (seen,) = watch["versions"]
    assert (seen["rollouts"], seen["version"]) == (1, str(world.version.ref))
    signs = seen["signs"]
    assert (signs["gap"], signs["tests_touched"], signs["tool_errors"], signs["no_edit"]) == (0.25, 1.0, 0.5, None)
    assert watch["compared"] == []


def test_task_sets_are_versioned_and_broken_lines_are_named(world, client) -> None:
    path = f"{world.base}/task-sets"
    made = client.post(path, {"slug": "new", "environment": "word-problems", "tasks": TASKS}, format="json")
    assert (made.status_code, made.json()["version"], made.json()["heldout_count"]) == (201, 1, 1)
    rows = client.get(f"{path}/{made.json()['id']}/tasks").json()["results"]
    assert [row["key"] for row in rows] == ["t1", "h1"]
    task = client.get(f"{world.base}/tasks/{rows[0]['id']}").json()
    assert task["reference"] == {"answer": "4"}
    broken = [TASKS[0], {"id": "t2", "split": "neither", "input": {"q": 1}}, TASKS[1], {**TASKS[0]}]
    answer = client.post(path, {"slug": "bad", "environment": "word-problems", "tasks": broken}, format="json")
    assert (answer.status_code, answer.json()["field"]) == (422, "tasks")
    assert "line 2" in answer.json()["detail"]
    assert "line 4" in answer.json()["detail"]
    assert not TaskSet.objects.filter(slug="bad").exists()
    no_environment = client.post(path, {"slug": "x", "environment": "mars", "tasks": TASKS}, format="json")
    assert no_environment.json()["field"] == "environment"


def test_rubric_versions_are_immutable_and_numbered(world, client) -> None:
    path = f"{world.base}/rubrics/fresh/versions"
    assert client.get(path).status_code == 404
    first = client.post(path, {"criteria": CRITERIA, "note": "first"}, format="json")
    same = client.post(path, {"criteria": CRITERIA}, format="json")
    assert (first.status_code, first.json()["number"], same.json()["id"]) == (201, 1, first.json()["id"])
    second = client.post(path, {"criteria": [{**CRITERIA[0], "weight": 2}]}, format="json").json()
    assert second["number"] == 2
    assert [row["number"] for row in client.get(path).json()["results"]] == [2, 1]
    assert client.get(f"{path}/1").json()["note"] == "first"
    assert client.get(f"{world.base}/rubrics/fresh").json()["latest"] == 2
    bad = client.post(path, {"criteria": [{**CRITERIA[0], "weight": -1}]}, format="json")
    assert (bad.status_code, bad.json()["field"]) == (422, "criteria")


def test_a_slot_is_pinned_and_let_go(world, client) -> None:
    world.transfer.delete()  # else it is under way to the version already
    path = f"{world.base}/replicas/{world.replica.pk}"
    assert client.post(f"{path}/unpin", {"reason": "x"}, format="json").status_code == 409
    pinned = client.post(f"{path}/pin", {"version": str(world.version.pk), "reason": "hold"}, format="json")
    assert pinned.status_code == 200, pinned.content
    assert pinned.json()["slots"][0]["desired_source"] == "pinned"
    assert WorkUnit.objects.filter(kind="transfer").count() == 1
    assert client.post(f"{path}/unpin", {"reason": "go"}, format="json").json()["slots"][0]["desired_version"] is None
    assert ReplicaSlot.objects.get().desired_source == ""
    wrong = client.post(
        f"{path}/pin", {"version": str(world.version.pk), "slot": "candidate", "reason": "x"}, format="json"
    )
    assert (wrong.status_code, wrong.json()["field"]) == (422, "slot")


def test_dead_letters_are_listed_and_replayed(world, client) -> None:
    rows = client.get(f"{world.base}/dead-letters").json()["results"]
    assert [row["id"] for row in rows] == [str(world.dead.pk)]
    assert client.get(f"{world.base}/work/{world.dead.pk}/attempts").json()["results"][0]["number"] == 1
    replay = f"{world.base}/work/{world.dead.pk}/replay"
    assert client.post(replay, {"reason": "fixed"}, format="json").json()["state"] == WorkState.QUEUED
    assert client.post(replay, {"reason": "again"}, format="json").status_code == 409
    assert client.get(f"{world.base}/dead-letters").json()["results"] == []


def test_pages_follow_one_another_without_loss_while_rows_are_added(world, client) -> None:
    for _ in range(7):
        make_run(world.project, world.model)
    path, seen = f"{world.base}/runs?page_size=3", []
    cursor = ""
    while cursor is not None:
        page = client.get(path + (f"&cursor={cursor}" if cursor else "")).json()
        seen += [row["id"] for row in page["results"]]
        cursor = page["next_cursor"]
        make_run(world.project, world.model)  # newest first: later rows never shift a page
    assert len(seen) == len(set(seen)) == 8
    assert seen == sorted(seen, key=uuid.UUID, reverse=True)


def test_a_thousand_rows_of_one_moment_are_paged_whole(world, client) -> None:
    rows = [
        Task(task_set=world.task_set, key=f"k{n}", split="train", position=n, input={"n": n}, reference={})
        for n in range(1, 401)
    ]
    Task.objects.bulk_create(rows)
    path, seen, cursor = f"{world.base}/task-sets/{world.task_set.pk}/tasks?page_size=200", [], ""
    while cursor is not None:
        page = client.get(path + (f"&cursor={cursor}" if cursor else "")).json()
        seen += [row["key"] for row in page["results"]]
        cursor = page["next_cursor"]
    assert len(seen) == len(set(seen)) == 402


def test_filters_narrow_lists(world, client) -> None:
    make_run(world.project, world.model, RunState.FAILED)
    cases = {
        "runs?state=failed": 1,
        "runs?state=running": 1,
        "runs?name=RUN": 2,
        "runs?created_before=2020-01-01T00:00:00Z": 0,
        f"groups?run={world.run.pk}&step=1": 1,
        "groups?step=2": 0,
        "rollouts?min_reward=0.5": 1,
        "rollouts?max_reward=0.5": 0,
        f"versions?run={world.run.pk}": 2,
        "transfers?cluster=eu": 1,
        "work?kind=train&state=dead": 1,
        f"attempts?unit={world.unit.pk}": 0,
        "clusters?role=serving": 0,
        "events?type=project.created": 1,
        f"events?topic=run:{world.run.pk}": 0,
        f"task-sets/{world.task_set.pk}/tasks?split=heldout": 1,
        "memberships?role=owner": 1,
    }
    found = {query: len(client.get(f"{world.base}/{query}").json()["results"]) for query in cases}
    assert found == cases


def test_metrics_are_thinned_and_say_what_was_left_out(world, client) -> None:
    now = timezone.now()
    MetricPoint.objects.bulk_create(
        MetricPoint(run=world.run, name="loss", step=n, value=math.sin(n / 30) if n != 50 else 9.0, at=now)
        for n in range(1, 1001)
    )
    MetricPoint.objects.create(run=world.run, name="loss", step=1001, value=math.nan, at=now)
    path = f"{world.base}/runs/{world.run.pk}/metrics"
    body = client.get(f"{path}?name=loss&points=100").json()["series"][0]
    assert (body["total"], body["not_finite"], len(body["points"])) == (1001, 1, 100)
    assert [body["points"][0]["step"], body["points"][-1]["step"]] == [1, 1000]
    assert max(point["value"] for point in body["points"]) == 9.0  # the spike survives
    assert [s["name"] for s in client.get(path).json()["series"]] == ["loss", "reward_mean"]
    assert client.get(f"{path}?points=2").status_code == 422
    assert client.get(f"{path}?points=2001").status_code == 422


def test_events_after_fill_a_gap_in_order(world, client) -> None:
    topic = f"project:{world.project.pk}"
    page = client.get(f"/api/v1/events?topic={topic}&after=0&limit=1").json()
    assert ([e["seq"] for e in page["results"]], page["next_after"], page["seq"]) == ([1], 1, 2)
    rest = client.get(f"/api/v1/events?topic={topic}&after=1").json()
    assert [e["seq"] for e in rest["results"]] == [2]
    assert set(rest["results"][0]) == {"v", "topic", "seq", "type", "ts", "data"}
    assert client.get("/api/v1/events").json()["field"] == "topic"
    assert client.get(f"/api/v1/events?topic={topic}&after=-1").json()["field"] == "after"
    assert client.get(f"/api/v1/events?topic={topic}&after={'9' * 30}").status_code == 422
    stranger = client_of(make_user(make_project()))
    assert stranger.get(f"/api/v1/events?topic={topic}").status_code == 404
    assert client_of().get(f"/api/v1/events?topic={topic}").status_code == 401


def test_me_says_what_one_may_do(world, client) -> None:
    me = client.get("/api/v1/me").json()
    assert (me["kind"], me["grants"][0]["role"], me["grants"][0]["project"]["slug"]) == (
        "user",
        "owner",
        world.project.slug,
    )
    assert "runs_control" in me["grants"][0]["actions"]
    key = client_of(make_key(world.project)[1]).get("/api/v1/me").json()
    assert (key["kind"], key["grants"][0]["role"]) == ("api_key", None)


def test_lists_ask_the_database_a_fixed_number_of_times(world, client, django_assert_max_num_queries) -> None:
    for _ in range(5):
        make_run(world.project, world.model)
    for resource in ("runs", "versions", "rollouts", "groups", "replicas", "transfers", "attempts", "memberships"):
        with django_assert_max_num_queries(9):
            client.get(f"{world.base}/{resource}")
