"""Exports over the API: asked for, waited for, downloaded whole and in ranges, deleted."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from structlog.testing import capture_logs

from controlplane.models import Event, ExportPart, PolicyVersion
from controlplane.selectors.exports import _store
from controlplane.states import EventType, MemberRole, Scope
from rl_core.store import open_store
from tests.controlplane.api.api_factories import World, client_of, make_export, make_key, make_user, make_world

pytestmark = pytest.mark.django_db
CONTENT = bytes(range(200))


@pytest.fixture(autouse=True)
def own_store(tmp_path, settings):
    """One of them damages what is in it."""
    settings.STORE_URL = (tmp_path / "store").as_uri()
    _store.cache_clear()
    yield
    _store.cache_clear()


@pytest.fixture
def world() -> World:
    return make_world()


def body_of(response: Any) -> bytes:
    async def whole() -> bytes:
        return b"".join([piece async for piece in response.streaming_content])

    return async_to_sync(whole)()


def file_path(world: World, *, content: bytes = CONTENT) -> str:
    version = PolicyVersion.objects.get(lineage=world.run.lineage, number=1)
    return f"{world.base}/exports/{make_export(version, content).pk}/files/config.json"


def test_an_export_is_asked_for_and_seen(world: World) -> None:
    client = client_of(make_key(world.project, Scope.EXPORT)[1])
    body = {"version": str(world.version.pk), "format": "mxfp4", "reason": "for a customer"}
    answer = client.post(f"{world.base}/exports", body, format="json")
    assert answer.status_code == 202, answer.content
    made = answer.json()
    assert (made["state"], made["format"], made["files"], made["expires_at"]) == ("pending", "mxfp4", [], None)
    assert client.get(f"{world.base}/exports/{made['id']}").json() == made
    listed = client.get(f"{world.base}/exports?version={world.version.pk}").json()["results"]
    assert [one["id"] for one in listed] == [made["id"], str(world.export.pk)]
    event = Event.objects.get(type=EventType.EXPORT_CHANGED)
    assert (event.reason, event.actor_kind, event.data["state"]) == ("for a customer", "api_key", "pending")
    ready = client.get(f"{world.base}/exports/{world.export.pk}").json()
    assert (ready["state"], ready["files"][0]["name"], ready["bytes"]) == ("ready", "config.json", 2)
    assert ready["expires_at"] > ready["written_at"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": "no"}, "version"),
        ({"version": str(uuid.uuid4())}, "version"),
        ({"format": "fp2"}, "format"),
        ({"format": None}, "format"),
        ({"reason": ""}, "reason"),
        ({"folder": "/etc"}, "folder"),
    ],
)
def test_bad_input_is_refused(world: World, changes: dict[str, Any], field: str) -> None:
    client = client_of(make_user(world.project))
    body = {"version": str(world.version.pk), "reason": "x"} | changes
    answer = client.post(f"{world.base}/exports", body, format="json")
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_a_version_of_another_project_is_not_exported(world: World) -> None:
    other = make_world()
    client = client_of(make_user(world.project))
    body = {"version": str(other.version.pk), "reason": "x"}
    answer = client.post(f"{world.base}/exports", body, format="json")
    assert (answer.status_code, answer.json()["field"]) == (422, "version")


def test_a_file_is_downloaded_whole(world: World) -> None:
    with capture_logs() as told:
        answer = client_of(make_key(world.project, Scope.EXPORT)[1]).get(file_path(world), HTTP_ACCEPT="image/png")
    assert [line["file"] for line in told if line["event"] == "export_downloaded"] == ["config.json"]
    assert answer.status_code == 200
    assert answer["Content-Length"] == "200"
    assert answer["Content-Disposition"] == 'attachment; filename="config.json"'
    assert body_of(answer) == CONTENT


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=1-", 1, 200),
        ("bytes=150-999999", 150, 200),
        ("bytes=-5", 195, 200),
        ("bytes=-999", 0, 200),
    ],
)
def test_a_range_is_downloaded(world: World, asked: str, start: int, end: int) -> None:
    answer = client_of(make_user(world.project)).get(file_path(world), HTTP_RANGE=asked)
    assert body_of(answer) == CONTENT[start:end]
    assert answer["Content-Length"] == str(end - start)
    if end - start < len(CONTENT):
        assert (answer.status_code, answer["Content-Range"]) == (206, f"bytes {start}-{end - 1}/200")


@pytest.mark.parametrize("asked", ["bytes=200-", "bytes=300-400", "bytes=5-4", "bytes=-0"])
def test_a_range_outside_the_file_is_refused(world: World, asked: str) -> None:
    answer = client_of(make_user(world.project)).get(file_path(world), HTTP_RANGE=asked)
    assert (answer.status_code, answer.json()["code"]) == (416, "range_refused")


@pytest.mark.parametrize("asked", ["bytes=1-2,5-6", "lines=1-2", "bytes=a-b", "bytes=-", "bytes=" + "9" * 40 + "-"])
def test_what_is_no_single_range_is_not_heeded(world: World, asked: str) -> None:
    answer = client_of(make_user(world.project)).get(file_path(world), HTTP_RANGE=asked)
    assert (answer.status_code, body_of(answer)) == (200, CONTENT)


def test_a_range_of_another_file_than_this_begins_anew(world: World) -> None:
    client, path = client_of(make_user(world.project)), file_path(world)
    other = client.get(path, HTTP_RANGE="bytes=5-", HTTP_IF_RANGE='"another"')
    assert (other.status_code, body_of(other)) == (200, CONTENT)
    same = client.get(path, HTTP_RANGE="bytes=5-", HTTP_IF_RANGE=other["ETag"])
    assert (same.status_code, body_of(same)) == (206, CONTENT[5:])


@pytest.mark.parametrize("name", ["nothing.json", "..%2Fconfig.json", "%2e%2e", "config.json%00", "CONFIG.JSON"])
def test_a_name_is_one_of_the_files_and_no_path(world: World, name: str) -> None:
    answer = client_of(make_user(world.project)).get(file_path(world).replace("config.json", name))
    assert answer.status_code in (404, 422), answer.content


def test_weights_are_for_those_who_may_export(world: World) -> None:
    path = file_path(world)
    for role in MemberRole:
        allowed = role in (MemberRole.OWNER, MemberRole.ENGINEER)
        assert client_of(make_user(world.project, role)).get(path).status_code == (200 if allowed else 403), role
    for scope in Scope:
        expected = 200 if scope == Scope.EXPORT else 403
        assert client_of(make_key(world.project, scope)[1]).get(path).status_code == expected, scope
    assert client_of().get(path).status_code == 401
    other = make_world()
    assert client_of(make_user(other.project)).get(path).status_code == 404
    below = path.replace(world.project.slug, other.project.slug)
    assert client_of(make_user(other.project)).get(below).status_code == 404


def test_a_deleted_export_gives_nothing(world: World) -> None:
    client = client_of(make_user(world.project))
    path = file_path(world)
    export = path.split("/files/")[0]
    assert client.post(f"{export}/delete", {"reason": ""}, format="json").status_code == 422
    gone = client.post(f"{export}/delete", {"reason": "delivered"}, format="json")
    assert (gone.status_code, gone.json()["state"], gone.json()["files"]) == (200, "deleted", [])
    assert client.get(path).status_code == 404
    assert client.post(f"{export}/delete", {"reason": "again"}, format="json").status_code == 409


def test_a_damaged_part_is_not_given_away(world: World, settings: Any) -> None:
    answer = client_of(make_user(world.project)).get(file_path(world))
    key = ExportPart.objects.filter(bytes=199).get().blob_key
    store = open_store(settings.STORE_URL)
    store.delete(key)
    store.put(key, b"x" * 199)
    with pytest.raises(Exception, match="does not hold the bytes"):
        body_of(answer)
