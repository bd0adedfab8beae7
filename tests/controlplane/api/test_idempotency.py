"""`Idempotency-Key`: once, whatever happens to the answer."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from controlplane.api import idempotency
from controlplane.conductor.duties import duties
from controlplane.models import ApiKey, Cluster, IdempotencyRecord, Project
from controlplane.states import MemberRole
from tests.controlplane.api.api_factories import client_of, make_key, make_project, make_user

BODY = {"slug": "eu", "role": "rollout", "region": "eu", "capacity": 1}


def post(client, path, body, key):
    return client.post(path, body, format="json", headers={"Idempotency-Key": key})


@pytest.mark.django_db
def test_the_same_call_again_gives_the_stored_answer_and_changes_nothing() -> None:
    project = make_project()
    client, path = client_of(make_user(project)), f"/api/v1/projects/{project.slug}/clusters"
    first, second = post(client, path, BODY, "k1"), post(client, path, BODY, "k1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert second["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first
    assert Cluster.objects.count() == 1
    assert post(client, path, BODY, "k2").status_code == 409  # another key is another call: the slug is taken


@pytest.mark.django_db
def test_the_same_key_with_another_body_or_path_is_refused() -> None:
    project = make_project()
    client, base = client_of(make_user(project)), f"/api/v1/projects/{project.slug}"
    assert post(client, f"{base}/clusters", BODY, "k").status_code == 201
    other = post(client, f"{base}/clusters", {**BODY, "slug": "us"}, "k")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    elsewhere = post(client, f"{base}/keys", {"name": "x", "scopes": ["read"]}, "k")
    assert elsewhere.status_code == 422
    assert Cluster.objects.count() == 1


@pytest.mark.django_db
def test_keys_of_different_callers_do_not_meet() -> None:
    project = make_project()
    path = f"/api/v1/projects/{project.slug}/keys"
    body = {"name": "x", "scopes": ["read"]}
    for client in (client_of(make_user(project)), client_of(make_user(project)), client_of(make_key(project)[1])):
        answer = post(client, path, body, "same")
        assert (answer.status_code, "Idempotency-Replayed" in answer) == (201, False)
    assert ApiKey.objects.filter(name="x").count() == 3


@pytest.mark.django_db
def test_an_error_is_not_stored() -> None:
    project = make_project()
    client, path = client_of(make_user(project)), f"/api/v1/projects/{project.slug}/memberships"
    body = {"username": "anna", "role": "viewer"}
    assert post(client, path, body, "k").status_code == 422
    user = make_user()
    user.username = "anna"
    user.save()
    assert post(client, path, body, "k").status_code == 200


@pytest.mark.django_db
def test_answers_to_callers_who_never_come_back_are_forgotten_too() -> None:
    project = make_project()
    client, path = client_of(make_user(project)), f"/api/v1/projects/{project.slug}/clusters"
    post(client, path, BODY, "old")
    IdempotencyRecord.objects.update(created_at=timezone.now() - timedelta(hours=24, minutes=1))
    post(client_of(make_user(project)), path, {**BODY, "slug": "us"}, "new")
    [ageing] = [duty for duty in duties() if duty.name == "idempotency"]
    assert ageing.action() == 1
    assert [record.key for record in IdempotencyRecord.objects.all()] == ["new"]


@pytest.mark.django_db
def test_after_24_hours_the_key_is_free() -> None:
    project = make_project()
    client, path = client_of(make_user(project)), f"/api/v1/projects/{project.slug}/keys"
    post(client, path, {"name": "x", "scopes": ["read"]}, "k")
    IdempotencyRecord.objects.update(created_at=timezone.now() - timedelta(hours=24, minutes=1))
    assert post(client, path, {"name": "y", "scopes": ["read"]}, "k").status_code == 201
    assert IdempotencyRecord.objects.count() == 1


@pytest.mark.django_db
def test_a_fresh_key_is_shown_once_even_under_a_replay() -> None:
    project = make_project()
    client, path = client_of(make_user(project)), f"/api/v1/projects/{project.slug}/keys"
    body = {"name": "x", "scopes": ["read"]}
    first, second = post(client, path, body, "k").json(), post(client, path, body, "k").json()
    assert first["key"].startswith("slw_")
    assert second == {**first, "key": None}
    with connection.cursor() as cursor:
        cursor.execute("SELECT string_agg(response::text, ' ') FROM controlplane_idempotencyrecord")
        assert first["key"] not in cursor.fetchone()[0]


@pytest.mark.django_db
def test_a_new_project_is_replayed_too() -> None:
    owner = make_user(make_project())
    client = client_of(owner)
    body = {"slug": "second", "name": "Second"}
    first, second = post(client, "/api/v1/projects", body, "k"), post(client, "/api/v1/projects", body, "k")
    assert (first.status_code, second.status_code, second.json()) == (201, 201, first.json())
    assert Project.objects.filter(slug="second").count() == 1


@pytest.mark.django_db
@pytest.mark.parametrize("key", ["", "a b", "x" * 201, "ключ"])
def test_a_malformed_key_is_refused(key: str) -> None:
    project = make_project()
    client, path = client_of(make_user(project)), f"/api/v1/projects/{project.slug}/clusters"
    assert post(client, path, BODY, key).status_code == 422
    assert Cluster.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_while_one_call_is_inside_a_second_is_told_so() -> None:
    project = make_project()
    user = make_user(project, MemberRole.OWNER)
    path = f"/api/v1/projects/{project.slug}/clusters"
    statuses: list[tuple[int, str]] = []

    def second() -> None:
        answer = post(client_of(user), path, BODY, "k")
        statuses.append((answer.status_code, answer.json()["code"]))
        connection.close()

    with transaction.atomic():
        idempotency._lock(f"{project.pk}|user:{user.pk}|k")  # as the first call holds it
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(20)
    assert statuses == [(409, "idempotency_in_flight")]
    assert post(client_of(user), path, BODY, "k").status_code == 201


@pytest.mark.django_db(transaction=True)
def test_eight_callers_at_once_make_one_cluster() -> None:
    project = make_project()
    user = make_user(project)
    path = f"/api/v1/projects/{project.slug}/clusters"
    statuses: list[int] = []

    def call() -> None:
        statuses.append(post(client_of(user), path, BODY, "k").status_code)
        connection.close()

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(statuses) == 8
    assert set(statuses) <= {201, 409}
    assert 201 in statuses
    assert Cluster.objects.count() == 1
