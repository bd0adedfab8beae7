"""Whatever is sent: a problem+json with the right status, never a 500."""

from __future__ import annotations

import json
import math
from unittest import mock

import pytest
from django.db import IntegrityError, OperationalError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.errors import UniqueViolation
from rest_framework.test import APIClient

from controlplane.api import base, health
from controlplane.api.wire import FiniteJSONRenderer
from controlplane.models import Project
from tests.controlplane.api.api_factories import client_of, make_key, make_project, make_user, make_world

pytestmark = pytest.mark.django_db
FIELDS = {"type", "title", "status", "code", "field", "request_id", "detail"}


def problem(response, status: int, code: str, field: str | None = None) -> dict:
    assert response.status_code == status, response.content
    assert response["Content-Type"] == "application/problem+json"
    body = json.loads(response.content)
    assert set(body) == FIELDS
    assert (body["status"], body["code"]) == (status, code), body
    assert body["request_id"] == response["X-Request-ID"]
    if field is not None:
        assert body["field"] == field, body
    return body


@pytest.fixture
def project() -> Project:
    return make_project()


@pytest.fixture
def client(project: Project):
    return client_of(make_user(project))


@pytest.fixture
def path(project: Project) -> str:
    return f"/api/v1/projects/{project.slug}/clusters"


GOOD = {"slug": "eu", "role": "rollout", "region": "eu", "capacity": 1}


def send(client, path: str, raw: bytes, content_type: str = "application/json"):
    return client.generic("POST", path, raw, content_type=content_type)


@pytest.mark.parametrize(
    ("raw", "status", "code", "field"),
    [
        (b"{", 400, "parse_error", ""),
        (b"\xff\xfe", 400, "parse_error", ""),
        (b'{"capacity": NaN}', 400, "parse_error", ""),
        (b'{"capacity": ' + b"9" * 5000 + b"}", 400, "parse_error", ""),
        (b"[" * 100_000, 400, "parse_error", ""),
        (b'{"a":' * 70 + b"1" + b"}" * 70, 422, "invalid", None),
        (b'{"slug": "a\\u0000b"}', 422, "invalid", "slug"),
        (b'{"slug": "\\ud800"}', 422, "invalid", "slug"),
        (b'{"\\u0000": 1}', 422, "invalid", ""),
        (b'{"capacity": 1e999}', 422, "invalid", "capacity"),
        (b'{"capacity": 9223372036854775808}', 422, "invalid", "capacity"),
        (b"[]", 422, "invalid", ""),
        (b'"text"', 422, "invalid", ""),
        (b"null", 422, "null", ""),
        (b"{}", 422, "required", "slug"),
        (b"", 422, "required", "slug"),
        (json.dumps({**GOOD, "colour": 1}).encode(), 422, "unknown_field", "colour"),
        (json.dumps({**GOOD, "capacity": 0}).encode(), 422, "min_value", "capacity"),
        (json.dumps({**GOOD, "role": "king"}).encode(), 422, "invalid_choice", "role"),
    ],
)
def test_bad_bodies(client, path, raw: bytes, status: int, code: str, field: str | None) -> None:
    problem(send(client, path, raw), status, code, field)


def test_a_body_over_the_limit_is_413(client, path, settings) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    problem(send(client, path, b" " * 101), 413, "too_large")
    assert send(client, path, json.dumps(GOOD).encode()).status_code == 201


def test_other_content_types_are_415(client, path) -> None:
    problem(send(client, path, b"slug=eu", "application/x-www-form-urlencoded"), 415, "unsupported_media_type")


def test_other_answers_are_406(client, path) -> None:
    problem(client.get(path, headers={"Accept": "text/html"}), 406, "not_acceptable")


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "NONSENSE"])
def test_other_methods_are_405(client, path, method: str) -> None:
    problem(client.generic(method, path), 405, "method_not_allowed")


@pytest.mark.parametrize(
    "tail",
    ["/nothing", "/projects/UPPER%00", "/projects/x/runs/not-a-uuid", "/projects/%ff%fe/runs", "/" + "x" * 3000],
)
def test_unknown_paths_are_404(client, tail: str) -> None:
    problem(client.get("/api/v1" + tail), 404, "not_found")


def test_an_unknown_path_asks_for_no_csrf_token() -> None:
    client = APIClient(enforce_csrf_checks=True)
    problem(client.post("/api/v1/nothing", {}, format="json"), 404, "not_found")


def test_huge_numbers_in_paths_are_404() -> None:
    world = make_world()
    client = client_of(make_user(world.project))
    for number in ("9" * 40, "2147483648", "0", "-1", "999999999"):
        problem(client.get(f"{world.base}/runs/{world.run.pk}/steps/{number}"), 404, "not_found")
    assert client.get(f"{world.base}/runs/{world.run.pk}/steps/1").status_code == 200


@pytest.mark.parametrize(
    "query", ["cursor=%00", "cursor=zzz", "cursor=" + "A" * 5000, "cursor=Ijk5OTk5OTk5OTk5OTk5OTk5OTk5OTki"]
)
@pytest.mark.parametrize("resource", ["runs", "events", "users"])
def test_forged_cursors_are_400(client, project: Project, resource: str, query: str) -> None:
    problem(client.get(f"/api/v1/projects/{project.slug}/{resource}?{query}"), 400, "cursor_invalid")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("state=king", "state"),
        ("colour=red", "colour"),
        ("page_size=0", "page_size"),
        ("page_size=" + "9" * 400, "page_size"),
        ("created_after=yesterday", "created_after"),
        ("name=%00", "name"),
    ],
)
def test_bad_query_parameters_are_422(client, project: Project, query: str, field: str) -> None:
    body = client.get(f"/api/v1/projects/{project.slug}/runs?{query}")
    assert body.status_code == 422
    assert body.json()["field"] == field


@pytest.mark.parametrize("header", ["Bearer", "Bearer a b", "Bearer slw_x_y", "Basic eDp5", "Bearer \xff"])
def test_bad_credentials_are_401_and_say_how(path, header: str) -> None:
    response = client_of().get(path, headers={"Authorization": header})
    problem(response, 401, "authentication_failed")
    assert response["WWW-Authenticate"] == 'Bearer realm="slipway"'


def test_a_session_needs_the_csrf_token(project: Project, path) -> None:
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(make_user(project))
    problem(client.post(path, GOOD, format="json"), 403, "permission_denied")
    key = APIClient(enforce_csrf_checks=True)
    key.credentials(HTTP_AUTHORIZATION=f"Bearer {make_key(project)[1]}")
    assert key.post(path, GOOD, format="json").status_code == 201


def test_a_database_that_does_not_answer_is_503_with_retry_after(client, path, monkeypatch) -> None:
    monkeypatch.setattr(base.ListView, "get_queryset", mock.Mock(side_effect=OperationalError("gone")))
    response = client.get(path)
    problem(response, 503, "unavailable")
    assert int(response["Retry-After"]) > 0


def test_a_lost_race_is_409_and_a_broken_invariant_is_a_bug(client, path, monkeypatch) -> None:
    client.raise_request_exception = False
    lost = IntegrityError("duplicate key")
    lost.__cause__ = UniqueViolation()
    monkeypatch.setattr(base.ListView, "get_queryset", mock.Mock(side_effect=lost))
    problem(client.get(path), 409, "conflict")
    monkeypatch.setattr(base.ListView, "get_queryset", mock.Mock(side_effect=IntegrityError("null value")))
    problem(client.get(path), 500, "internal")


def test_healthz_tells_up_from_down(client, monkeypatch) -> None:
    assert client.get("/healthz").json() == {"status": "ok", "database": "up"}
    down = mock.Mock(cursor=mock.Mock(side_effect=OperationalError("gone")))
    monkeypatch.setattr(health, "connection", down)
    assert client.get("/healthz").status_code == 503


def test_every_answer_has_a_request_id_and_a_policy(client, path) -> None:
    given_id = client.get(path, headers={"X-Request-ID": "abc-1"})
    assert given_id["X-Request-ID"] == "abc-1"
    forged = client.get(path, headers={"X-Request-ID": "a b;\u00e9"})
    assert forged["X-Request-ID"].isalnum()
    policy = given_id["Content-Security-Policy"]
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "ws://testserver" in policy
    assert "unsafe-eval" not in policy


def test_a_bug_is_500_as_a_problem(client, path, monkeypatch) -> None:
    client.raise_request_exception = False
    monkeypatch.setattr(base.ListView, "get_queryset", mock.Mock(side_effect=KeyError("bug")))
    body = problem(client.get(path), 500, "internal")
    assert "bug" not in body["detail"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON, name=st.sampled_from(["slug", "region", "capacity", "role", "model", "?"]))
def test_no_json_is_a_500(client, path, value: object, name: str) -> None:
    response = send(client, path, json.dumps({**GOOD, name: value}).encode("utf-8", "surrogatepass"))
    assert response.status_code in {201, 400, 409, 422}, response.content


def test_numbers_that_are_not_finite_leave_as_null() -> None:
    rendered = FiniteJSONRenderer().render({"a": [1.5, math.nan], "b": {"c": math.inf}})
    assert json.loads(rendered) == {"a": [1.5, None], "b": {"c": None}}
