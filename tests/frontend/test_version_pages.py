"""A version's page, and its exports: who may ask for them, delete them and download them."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from structlog.testing import capture_logs

from controlplane.models import Event, Export, PolicyVersion, WorkUnit
from controlplane.selectors.exports import _store
from controlplane.states import EventType, MemberRole, VersionState, WorkKind, WorkState
from tests.controlplane.api.api_factories import make_export
from tests.factories import make_workspace
from tests.fleet_story import FleetStory, fleet_story

pytestmark = pytest.mark.django_db


@pytest.fixture
def fleet() -> FleetStory:
    _store.cache_clear()
    return fleet_story(steps=4)


def client_of(story: FleetStory, role: MemberRole = MemberRole.OWNER) -> Client:
    client = Client()
    client.force_login(story.workspace.people[role.value])
    return client


def addresses(story: FleetStory, export: Export) -> dict[str, str]:
    return {
        "page": reverse("version", args=[story.head.pk]),
        "export": reverse("version_export", args=[story.head.pk]),
        "delete": reverse("export_delete", args=[export.pk]),
        "download": reverse("export_download", args=[export.pk, "config.json"]),
    }


def test_the_page_says_what_a_version_is_and_who_holds_it(fleet: FleetStory) -> None:
    page = client_of(fleet).get(reverse("version", args=[fleet.head.pk])).content.decode()
    for said in (
        str(fleet.head.ref),
        fleet.head.root,
        f"{fleet.serving.slug}/engine-1",
        "training head",
        "head of its lineage",
        "held by a replica",
        "Never exported",
        reverse("version", args=[fleet.head.parent_id]),
    ):
        assert said in page, said
    assert reverse("version", args=[fleet.head.pk]) in client_of(fleet).get(reverse("clusters")).content.decode()


def test_a_retired_version_says_so_and_is_not_exported(fleet: FleetStory) -> None:
    version = fleet.head
    PolicyVersion.objects.filter(pk=version.pk).update(retired_at=version.committed_at)
    client = client_of(fleet)
    page = client.get(reverse("version", args=[version.pk])).content.decode()
    assert "nobody needed them any more" in page
    assert reverse("version_export", args=[version.pk]) not in page
    refused = client.post(reverse("version_export", args=[version.pk]), {"format": "bf16", "reason": "x"})
    assert refused.status_code == 409
    assert "retired" in refused.content.decode()


def test_an_export_is_asked_for_downloaded_and_deleted(fleet: FleetStory) -> None:
    client = client_of(fleet, MemberRole.ENGINEER)
    address = reverse("version_export", args=[fleet.head.pk])
    assert client.post(address, {"format": "fp8-block", "reason": ""}).status_code == 409
    assert client.post(address, {"format": "fp2", "reason": "x"}).status_code == 409
    assert client.post(address, {"format": "fp8-block", "reason": "for a customer"}).status_code == 302
    made = Export.objects.get()
    assert (made.version, made.format) == (fleet.head, "fp8-block")
    event = Event.objects.get(type=EventType.EXPORT_CHANGED)
    assert (event.reason, event.actor) == ("for a customer", fleet.workspace.people["engineer"].username)
    page = reverse("version", args=[fleet.head.pk])
    assert "a worker is writing them" in client.get(page).content.decode()
    WorkUnit.objects.filter(kind=WorkKind.EXPORT).update(state=WorkState.DEAD, error="<b>no space</b>")
    failed = client.get(page, headers={"X-Slipway-Fragment": "1"}).content.decode()
    assert "&lt;b&gt;no space" in failed
    assert "export it again" in failed
    made.delete()
    ready = make_export(fleet.head, b'{"a": 1}')
    download = reverse("export_download", args=[ready.pk, "config.json"])
    assert download in client.get(page).content.decode()
    with capture_logs() as told:
        answer = client.get(download)
    taken = [line["actor"] for line in told if line["event"] == "export_downloaded"]
    assert taken == [fleet.workspace.people["engineer"].username]

    async def whole() -> bytes:
        return b"".join([piece async for piece in answer.streaming_content])

    assert async_to_sync(whole)() == b'{"a": 1}'
    assert client.get(download, headers={"Range": "bytes=99-"}).status_code == 416
    for name in ("other.json", "config.json\x00"):
        assert client.get(reverse("export_download", args=[ready.pk, name])).status_code == 404
    assert client.post(reverse("export_delete", args=[ready.pk]), {"reason": "delivered"}).status_code == 302
    assert client.get(download).status_code == 404
    assert client.post(reverse("export_delete", args=[ready.pk]), {"reason": "again"}).status_code == 409


@pytest.mark.parametrize("role", list(MemberRole))
def test_weights_are_for_those_who_may_export(fleet: FleetStory, role: MemberRole) -> None:
    export = make_export(fleet.head)
    client, permitted = client_of(fleet, role), role in (MemberRole.OWNER, MemberRole.ENGINEER)
    where = addresses(fleet, export)
    page = client.get(where["page"]).content.decode()
    for act in ("export", "delete", "download"):
        assert (where[act] in page) == permitted, act
        assert client.get(where[act]).status_code == (200 if permitted else 403), act
    for act in ("export", "delete"):
        if not permitted:
            assert client.post(where[act], {"format": "bf16", "reason": "mine"}).status_code == 403, act
    assert Export.objects.filter(deleted_at__isnull=True).count() == 1


def test_anothers_versions_and_exports_do_not_exist(fleet: FleetStory) -> None:
    export = make_export(fleet.head)
    other = Client()
    other.force_login(make_workspace().owner)
    for name, address in addresses(fleet, export).items():
        assert other.get(address).status_code == 404, name
        assert Client().get(address).status_code == 302, name
        if name in ("export", "delete"):
            assert other.post(address, {"format": "bf16", "reason": "mine"}).status_code == 404, name


def test_a_version_that_is_not_committed_shows_what_there_is(fleet: FleetStory) -> None:
    begun = PolicyVersion.objects.create(lineage=fleet.run.lineage, epoch=9, number=9, state=VersionState.PUBLISHING)
    page = client_of(fleet).get(reverse("version", args=[begun.pk])).content.decode()
    assert "publishing" in page
    assert reverse("version_export", args=[begun.pk]) not in page


def test_queries_do_not_grow_with_exports(fleet: FleetStory) -> None:
    client, page = client_of(fleet), reverse("version", args=[fleet.head.pk])

    def count() -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get(page)
        return len(queries)

    make_export(fleet.head)
    count()
    before = count()
    for name in ("mxfp4", "nvfp4"):
        row = Export.objects.create(version=fleet.head, format=name)
        row.files.create(name="config.json", bytes=1, sha256="0" * 64)
    assert count() == before
