"""What surrounds pages: fragments, error pages, the chart library, the navigation."""

from __future__ import annotations

import gzip
from pathlib import Path

import plotly
import pytest
from django.test import Client
from django.urls import reverse

from controlplane.services.events import project_topic, run_topic
from controlplane.states import MemberRole
from frontend.frame import FRAGMENT_HEADER
from frontend.navigation import ENTRIES, navigation
from frontend.views.assets import plotly_url
from tests.factories import Workspace

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("name", ["runs", "events", "work"])
def test_a_moving_part_is_rendered_alone(played, name: str) -> None:
    workspace, _ = played
    client = Client()
    client.force_login(workspace.owner)
    whole = client.get(reverse(name))
    part = client.get(reverse(name), headers={FRAGMENT_HEADER: "1"})
    assert "<html" in whole.content.decode()
    assert "<html" not in part.content.decode()
    assert "<section" in part.content.decode()
    assert FRAGMENT_HEADER in whole.headers["Vary"]
    assert FRAGMENT_HEADER in part.headers["Vary"]


def test_a_page_follows_its_topics_from_where_its_content_stands(played) -> None:
    workspace, run = played
    client = Client()
    client.force_login(workspace.owner)
    followed = client.get(reverse("run", args=[run.pk])).context["live_topics"]
    assert set(followed) == {project_topic(workspace.project.pk), run_topic(run.pk)}
    assert followed[run_topic(run.pk)] == run.project.topics.get(name=run_topic(run.pk)).seq > 0


def test_navigation_shows_what_the_role_may_open(played) -> None:
    labels = {role: {entry.label for _, entries in navigation(role.value) for entry in entries} for role in MemberRole}
    assert "API keys" in labels[MemberRole.OWNER]
    assert "API keys" not in labels[MemberRole.ENGINEER]
    assert len({entry.shortcut for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        reverse(entry.url_name)


def test_errors_are_pages_of_ours(played) -> None:
    workspace, run = played
    client = Client()
    client.force_login(workspace.people["viewer"])
    missing = client.get("/nothing/here/")
    assert missing.status_code == 404
    assert "There is nothing here" in missing.content.decode()
    forbidden = client.get(reverse("run_new"))
    assert forbidden.status_code == 403
    assert "You may not do this" in forbidden.content.decode()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(workspace.owner)
    stale = strict.post(reverse("run_control", args=[run.pk, "pause"]), {"reason": "x"})
    assert stale.status_code == 403
    assert "open for too long" in stale.content.decode()


def test_a_bug_is_a_page_of_ours(played, monkeypatch) -> None:
    workspace, _ = played
    monkeypatch.setattr("frontend.views.home.problems_of", lambda project: 1 / 0)
    client = Client(raise_request_exception=False)
    client.force_login(workspace.owner)
    response = client.get("/")
    assert response.status_code == 500
    assert "Something broke on our side" in response.content.decode()
    assert response.headers["X-Request-ID"]


def test_the_chart_library_comes_from_its_package_compressed_and_for_ever(played: tuple[Workspace, object]) -> None:
    response = Client().get(plotly_url(), headers={"Accept-Encoding": "gzip"})
    assert response.headers["Content-Encoding"] == "gzip"
    assert "immutable" in response.headers["Cache-Control"]
    bundle = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    assert gzip.decompress(response.content) == bundle.read_bytes()
    assert Client().get(reverse("plotly", args=["0.0.1"])).status_code == 404
