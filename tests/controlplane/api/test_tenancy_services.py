"""Projects, people, roles, keys."""

from __future__ import annotations

import hashlib
import json
import threading
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.errors import Conflict, Invalid
from controlplane.models import ApiKey, Event, Membership, User
from controlplane.services.events import SYSTEM, Actor
from controlplane.services.tenancy import (
    api_key_authenticate,
    api_key_create,
    api_key_revoke,
    membership_remove,
    membership_set,
    project_create,
    user_create,
)
from controlplane.states import ActorKind, EventType, MemberRole, Scope
from tests.controlplane.api.api_factories import client_of, make_key, make_project, make_user

pytestmark = pytest.mark.django_db
ANNA = Actor(ActorKind.USER, "anna")


def test_a_key_is_kept_as_a_digest_and_never_logged(caplog) -> None:
    project = make_project()
    key, text = api_key_create(project=project, name="ci", scopes=[Scope.READ], actor=ANNA)
    scheme, prefix, secret = text.split("_", 2)
    assert (scheme, prefix) == ("slw", key.prefix)
    assert len(secret) >= 43
    assert key.digest == hashlib.sha256(text.encode()).hexdigest()
    events = json.dumps(list(Event.objects.values("data", "reason", "actor")))
    assert "key.created" in set(Event.objects.values_list("type", flat=True))
    assert secret not in events + caplog.text
    assert key.digest not in events


def test_a_key_works_until_it_is_revoked_or_expires() -> None:
    project = make_project()
    key, text = make_key(project, Scope.READ)
    assert api_key_authenticate(token=text) == key
    assert api_key_authenticate(token=text + "x") is None
    assert api_key_authenticate(token="\ud800") is None
    ApiKey.objects.filter(pk=key.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
    assert api_key_authenticate(token=text) is None
    ApiKey.objects.filter(pk=key.pk).update(expires_at=timezone.now() + timedelta(hours=1))
    assert api_key_authenticate(token=text) is not None
    api_key_revoke(key=key, actor=ANNA, reason="leaked")
    first = ApiKey.objects.get(pk=key.pk).revoked_at
    assert api_key_revoke(key=key, actor=ANNA).revoked_at == first
    assert api_key_authenticate(token=text) is None
    revoked = Event.objects.get(type=EventType.KEY_REVOKED)
    assert (revoked.actor, revoked.reason) == ("anna", "leaked")


def test_last_use_is_written_once_a_minute() -> None:
    key, text = make_key(make_project())
    api_key_authenticate(token=text)
    first = ApiKey.objects.get(pk=key.pk).last_used_at
    assert first is not None
    api_key_authenticate(token=text)
    assert ApiKey.objects.get(pk=key.pk).last_used_at == first
    ApiKey.objects.filter(pk=key.pk).update(last_used_at=first - timedelta(minutes=2))
    api_key_authenticate(token=text)
    assert ApiKey.objects.get(pk=key.pk).last_used_at >= first


def test_a_key_needs_a_scope() -> None:
    with pytest.raises(Invalid):
        api_key_create(project=make_project(), name="x", scopes=[], actor=ANNA)


def test_a_project_has_its_owner_and_its_slug_alone() -> None:
    owner = make_user()
    project = project_create(slug="one", name="One", actor=ANNA, owner=owner)
    assert Membership.objects.get(project=project).role == MemberRole.OWNER
    with pytest.raises(Conflict):
        project_create(slug="one", name="Again", actor=ANNA)
    assert list(Event.objects.order_by("seq").values_list("type", "seq")) == [
        ("project.created", 1),
        ("member.changed", 2),
    ]


def test_roles_change_with_an_event_and_the_same_role_changes_nothing() -> None:
    project, user = make_project(), make_user()
    for role in (MemberRole.VIEWER, MemberRole.VIEWER, MemberRole.ENGINEER):
        membership_set(project=project, user=user, role=role, actor=ANNA, reason="why")
    changes = Event.objects.filter(type=EventType.MEMBER_CHANGED).order_by("seq").values_list("data", flat=True)
    assert [(data["before"], data["role"]) for data in changes] == [(None, "viewer"), ("viewer", "engineer")]


def test_the_last_owner_stays() -> None:
    project = make_project()
    owner = make_user(project)
    membership = Membership.objects.get(user=owner)
    with pytest.raises(Conflict):
        membership_set(project=project, user=owner, role=MemberRole.VIEWER, actor=ANNA)
    with pytest.raises(Conflict):
        membership_remove(membership=membership, actor=ANNA)
    make_user(project)
    membership_remove(membership=membership, actor=ANNA)
    assert not Membership.objects.filter(user=owner).exists()


@pytest.mark.django_db(transaction=True)
def test_two_owners_who_leave_at_once_do_not_both_go() -> None:
    project = make_project()
    memberships = [Membership.objects.get(user=make_user(project)) for _ in range(2)]
    outcomes: list[str] = []

    def leave(membership: Membership) -> None:
        try:
            membership_remove(membership=membership, actor=ANNA)
            outcomes.append("gone")
        except Conflict:
            outcomes.append("kept")
        finally:
            connection.close()

    threads = [threading.Thread(target=leave, args=(membership,)) for membership in memberships]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["gone", "kept"]


@pytest.mark.parametrize(
    ("username", "password", "field"),
    [
        ("anna", "short", "password"),
        ("anna", "password123456"[:8], "password"),
        ("a b", "a long enough one", "username"),
    ],
)
def test_weak_logins_are_refused(username: str, password: str, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        user_create(project=make_project(), username=username, password=password, role=MemberRole.VIEWER, actor=SYSTEM)
    assert caught.value.field == field
    assert not User.objects.filter(username=username).exists()


def test_a_new_login_works_and_its_password_is_in_no_answer() -> None:
    project = make_project()
    client = client_of(make_user(project))
    body = {"username": "berta", "password": "a long enough password", "role": "reviewer"}
    answer = client.post(f"/api/v1/projects/{project.slug}/users", body, format="json")
    assert answer.status_code == 201
    assert "password" not in answer.content.decode()
    assert "a long enough password" not in json.dumps(list(Event.objects.values("data")))
    assert client_of().login(username="berta", password="a long enough password")
    again = client.post(f"/api/v1/projects/{project.slug}/users", body, format="json")
    assert (again.status_code, again.json()["field"]) == (409, "username")


def test_no_listing_of_keys_holds_a_secret() -> None:
    project = make_project()
    client = client_of(make_user(project))
    base = f"/api/v1/projects/{project.slug}/keys"
    made = client.post(base, {"name": "ci", "scopes": ["read", "runs"]}, format="json").json()
    text = made["key"]
    assert client_of(text).get("/api/v1/me").json()["grants"][0]["scopes"] == ["read", "runs"]
    for path in (base, f"{base}/{made['id']}"):
        body = client.get(path).content.decode()
        assert text not in body
        assert "digest" not in body
    assert client.post(f"{base}/{made['id']}/revoke", {"reason": "x"}, format="json").status_code == 200
    assert client_of(text).get("/api/v1/me").status_code == 401


def test_only_owners_open_projects_and_keys_none() -> None:
    project = make_project()
    body = {"slug": "another", "name": "Another"}
    for caller in (make_user(project, MemberRole.ENGINEER), make_user(), make_key(project)[1]):
        assert client_of(caller).post("/api/v1/projects", body, format="json").status_code == 403
    owner = make_user(project)
    assert client_of(owner).post("/api/v1/projects", body, format="json").status_code == 201
    assert Membership.objects.get(project__slug="another").user == owner
    assert {p["slug"] for p in client_of(owner).get("/api/v1/projects").json()["results"]} == {project.slug, "another"}
    assert client_of(owner).post("/api/v1/projects", body, format="json").status_code == 409
