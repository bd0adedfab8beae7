"""Every endpoint with every role and every scope, and with strangers."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.urls import URLPattern, URLResolver, get_resolver

from controlplane.api.base import ApiView
from controlplane.permissions import ROLES, SCOPES, Action, allowed
from controlplane.states import MemberRole, Scope
from tests.controlplane.api.api_factories import (
    CRITERIA,
    TASKS,
    World,
    client_of,
    make_key,
    make_user,
    make_world,
    run_body,
)

pytestmark = pytest.mark.django_db

BASE = "projects/<slug:project>/"
READ, MANAGE = Action.READ, Action.PROJECT_MANAGE

# (method, route) → the action it needs. A route that is missing here fails the first test.
MATRIX: dict[tuple[str, str], Action] = {
    ("GET", "projects/<slug:project>"): READ,
    ("GET", BASE + "users"): READ,
    ("POST", BASE + "users"): MANAGE,
    ("GET", BASE + "memberships"): READ,
    ("POST", BASE + "memberships"): MANAGE,
    ("GET", BASE + "memberships/<uuid:id>"): READ,
    ("DELETE", BASE + "memberships/<uuid:id>"): MANAGE,
    ("GET", BASE + "keys"): MANAGE,
    ("POST", BASE + "keys"): MANAGE,
    ("GET", BASE + "keys/<uuid:id>"): MANAGE,
    ("POST", BASE + "keys/<uuid:id>/revoke"): MANAGE,
    ("POST", BASE + "task-sets"): Action.CATALOG_WRITE,
    ("POST", BASE + "task-sets/file"): Action.CATALOG_WRITE,
    ("POST", BASE + "rubrics/<slug:slug>/versions"): Action.RUBRICS_PUBLISH,
    ("POST", BASE + "clusters"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/pin"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/unpin"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/drain"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/undrain"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/repair"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/lend"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/return"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/forget"): Action.FLEET_CONTROL,
    ("POST", BASE + "replicas/<uuid:id>/lease"): Action.REPLICA_ENROL,
    ("POST", BASE + "clusters/<slug:slug>/replicas"): Action.REPLICA_ENROL,
    ("POST", BASE + "clusters/<slug:slug>/configure"): Action.FLEET_CONTROL,
    ("POST", BASE + "clusters/<slug:slug>/lending"): Action.FLEET_CONTROL,
    ("POST", BASE + "lending"): Action.FLEET_CONTROL,
    ("POST", BASE + "exports"): Action.WEIGHTS_EXPORT,
    ("POST", BASE + "exports/<uuid:id>/delete"): Action.WEIGHTS_EXPORT,
    ("GET", BASE + "exports/<uuid:id>/files/<str:name>"): Action.WEIGHTS_EXPORT,
    ("POST", BASE + "runs"): Action.RUNS_CONTROL,
    ("POST", BASE + "runs/<uuid:id>/pause"): Action.RUNS_CONTROL,
    ("POST", BASE + "runs/<uuid:id>/resume"): Action.RUNS_CONTROL,
    ("POST", BASE + "runs/<uuid:id>/stop"): Action.RUNS_CONTROL,
    ("POST", BASE + "runs/<uuid:id>/fork"): Action.RUNS_CONTROL,
    ("POST", BASE + "work/<uuid:id>/replay"): Action.WORK_REPLAY,
    ("POST", BASE + "lanes"): Action.LANES_MANAGE,
    ("POST", BASE + "lanes/<slug:slug>/train"): Action.RUNS_CONTROL,
    ("POST", BASE + "lanes/<slug:slug>/erase"): Action.USERS_ERASE,
    ("POST", BASE + "releases"): Action.RELEASES_PROPOSE,
    ("POST", BASE + "lanes/<slug:slug>/cadence"): Action.LANES_MANAGE,
    ("POST", BASE + "lanes/<slug:slug>/recording"): Action.LANES_MANAGE,
    ("POST", BASE + "lanes/<slug:slug>/pause"): Action.RELEASES_PROPOSE,
    ("POST", BASE + "lanes/<slug:slug>/resume"): Action.RELEASES_PROPOSE,
    ("POST", BASE + "lanes/<slug:slug>/run-now"): Action.RELEASES_PROPOSE,
    ("POST", BASE + "lanes/<slug:slug>/skip"): Action.RELEASES_PROPOSE,
    ("POST", BASE + "lanes/<slug:slug>/rollback"): Action.RELEASES_ABORT,
    ("POST", BASE + "releases/<uuid:id>/advance"): Action.RELEASES_PROPOSE,
    ("POST", BASE + "releases/<uuid:id>/pause"): Action.RELEASES_PROPOSE,
    ("POST", BASE + "releases/<uuid:id>/resume"): Action.RELEASES_PROPOSE,
    ("POST", BASE + "alerts/<uuid:id>/resolve"): Action.RELEASES_APPROVE,
    ("POST", BASE + "alert-hooks"): Action.LANES_MANAGE,
    ("POST", BASE + "alert-hooks/<uuid:id>/disable"): Action.LANES_MANAGE,
    ("POST", BASE + "releases/<uuid:id>/approve"): Action.RELEASES_APPROVE,
    ("POST", BASE + "releases/<uuid:id>/promote"): Action.RELEASES_APPROVE,
    ("POST", BASE + "releases/<uuid:id>/abort"): Action.RELEASES_ABORT,
    ("POST", BASE + "releases/<uuid:id>/rollback"): Action.RELEASES_ABORT,
    ("POST", BASE + "lanes/<slug:slug>/withdraw-consent"): Action.FEEDBACK_RETRACT,
    ("POST", BASE + "feedback/<uuid:id>/retract"): Action.FEEDBACK_RETRACT,
    ("POST", BASE + "rejected-payloads/<uuid:id>/replay"): Action.WORK_REPLAY,
    ("POST", BASE + "signals"): Action.RUBRICS_PUBLISH,
    ("POST", BASE + "signals/detected"): Action.RUBRICS_PUBLISH,
    ("POST", BASE + "signal-maps"): Action.RUBRICS_PUBLISH,
    ("POST", BASE + "sources"): Action.LANES_MANAGE,
    ("POST", BASE + "sources/<slug:slug>/rotate"): Action.LANES_MANAGE,
    ("POST", BASE + "sources/<slug:slug>/configure"): Action.LANES_MANAGE,
    ("POST", BASE + "sources/<slug:slug>/keys"): MANAGE,
    **{
        ("GET", BASE + route): READ
        for route in (
            "models",
            "models/<slug:slug>",
            "environments",
            "environments/<slug:slug>",
            "environments/<slug:slug>/watch",
            "task-sets",
            "task-sets/<uuid:id>",
            "task-sets/<uuid:id>/tasks",
            "task-sets/<uuid:id>/report",
            "tasks/<uuid:id>",
            "tasks/<uuid:id>/history",
            "rubrics",
            "rubrics/<slug:slug>",
            "rubrics/<slug:slug>/versions",
            "rubrics/<slug:slug>/versions/<number:number>",
            "clusters",
            "clusters/<slug:slug>",
            "clusters/<slug:slug>/lending",
            "lending-schema",
            "loans",
            "loans/<uuid:id>",
            "replicas",
            "replicas/<uuid:id>",
            "versions",
            "versions/<uuid:id>",
            "exports",
            "exports/<uuid:id>",
            "transfers",
            "transfers/<uuid:id>",
            "runs",
            "runs/spec-schema",
            "runs/<uuid:id>",
            "runs/<uuid:id>/capacity",
            "runs/<uuid:id>/stages",
            "runs/<uuid:id>/steps",
            "runs/<uuid:id>/steps/<number:number>",
            "runs/<uuid:id>/metrics",
            "evaluations",
            "evaluations/<uuid:id>",
            "groups",
            "groups/<uuid:id>",
            "rollouts",
            "rollouts/<uuid:id>",
            "rollouts/<uuid:id>/trajectory",
            "events",
            "work",
            "work/<uuid:id>",
            "work/<uuid:id>/attempts",
            "attempts",
            "attempts/<uuid:id>",
            "dead-letters",
            "lanes",
            "lanes/<slug:slug>",
            "lanes/<slug:slug>/served",
            "lanes/<slug:slug>/served-at",
            "generations",
            "releases",
            "releases/<uuid:id>",
            "releases/<uuid:id>/steps",
            "lanes/<slug:slug>/cadence",
            "lanes/<slug:slug>/recording",
            "lanes/<slug:slug>/slots",
            "cadence-schema",
            "alerts",
            "alerts/<uuid:id>",
            "alerts/<uuid:id>/deliveries",
            "alert-hooks",
            "feedback",
            "feedback/health",
            "rejected-payloads",
            "signals",
            "signal-maps",
            "sources",
        )
    },
}


def _routes() -> dict[str, type[ApiView]]:
    """Every project-scoped route of this API and its view."""
    found: dict[str, type[ApiView]] = {}

    def walk(patterns: list[Any], prefix: str) -> None:
        for pattern in patterns:
            route = prefix + str(getattr(pattern.pattern, "_route", ""))
            if isinstance(pattern, URLResolver):
                walk(pattern.url_patterns, route)
            elif isinstance(pattern, URLPattern):
                view = getattr(pattern.callback, "view_class", None)
                if view and issubclass(view, ApiView) and route.startswith("projects/<slug:project>"):
                    found[route] = view

    walk(get_resolver("controlplane.api.urls").url_patterns, "")
    return found


def _methods(view: type[ApiView]) -> set[str]:
    return {name.upper() for name in view.http_method_names if name != "head" and hasattr(view, name)}


def test_the_matrix_names_every_endpoint_and_the_views_agree() -> None:
    declared = {
        (method, route): view.actions.get(method) for route, view in _routes().items() for method in _methods(view)
    }
    assert declared == MATRIX


def _path(world: World, route: str, ids: dict[str, uuid.UUID]) -> str:
    segment = route.split("/")[2] if route.count("/") >= 2 else ""
    chosen = ids.get(segment, world.run.pk)
    slugs = {"models": "tiny", "environments": "word-problems", "rubrics": "sums", "clusters": "eu"}
    path = route.replace("<slug:project>", world.project.slug).replace("<uuid:id>", str(chosen))
    path = path.replace("<number:number>", "1").replace("<str:name>", "config.json")
    return "/api/v1/" + path.replace("<slug:slug>", slugs.get(segment, "none-such"))


def _body(world: World, route: str) -> dict[str, Any]:
    name = uuid.uuid4().hex[:10]
    if route.endswith("/exports"):
        return {"version": str(world.version.pk), "reason": "x"}
    if route.endswith("/pin"):
        return {"version": str(world.version.pk), "reason": "x"}
    if route.endswith("/fork"):
        return {"name": "fork", "step_number": 1, "overrides": run_body(world)["spec"]}
    if route.endswith("/lend"):
        return {"run": str(world.run.pk), "reason": "x"}
    if route.endswith("/lease"):
        return {}
    if route.endswith("/replicas"):
        return {
            "name": f"r{name}",
            "inference_url": "https://engine.example:1",
            "control_url": "https://engine.example:2",
        }
    if route.endswith(">/lending"):
        return {"spec": {"windows": [{"days": [0]}]}, "reason": "x"}
    bodies: dict[str, dict[str, Any]] = {
        "lending": {"allowed": True, "reason": "x"},
        "users": {"username": f"new{name}", "password": "a long enough password", "role": "viewer"},
        "memberships": {"username": "nobody-at-all", "role": "viewer"},
        "keys": {"name": "k", "scopes": ["read"]},
        "task-sets": {"slug": f"s{name}", "environment": "word-problems", "tasks": TASKS},
        "versions": {"criteria": CRITERIA},
        "clusters": {"slug": f"c{name}", "role": "rollout", "region": "eu", "capacity": 1},
        "runs": run_body(world),
    }
    return bodies.get(route.rsplit("/", 1)[-1], {"reason": "x"})


def _ids(world: World) -> dict[str, uuid.UUID]:
    member = make_user(world.project, MemberRole.VIEWER)
    key, _ = make_key(world.project, Scope.READ)
    return {
        "memberships": member.memberships.get().pk,
        "keys": key.pk,
        "task-sets": world.task_set.pk,
        "tasks": world.task.pk,
        "replicas": world.replica.pk,
        "versions": world.version.pk,
        "transfers": world.transfer.pk,
        "exports": world.export.pk,
        "evaluations": world.evaluation.pk,
        "groups": world.group.pk,
        "rollouts": world.rollout.pk,
        "work": world.dead.pk,
        "attempts": world.attempt.pk,
    }


def _call(client: Any, world: World, method: str, route: str, ids: dict[str, uuid.UUID]) -> int:
    path = _path(world, route, ids)
    body = _body(world, route) if method == "POST" else None
    response = getattr(client, method.lower())(path, body, format="json")
    status: int = response.status_code
    return status


REFUSED = {401, 403}


def test_each_role_may_do_what_the_matrix_says_and_nothing_else() -> None:
    world = make_world()
    make_user(world.project, MemberRole.OWNER)
    clients = {role: client_of(make_user(world.project, role)) for role in MemberRole}
    wrong = []
    ids = _ids(world)
    for (method, route), action in MATRIX.items():
        for role in reversed(MemberRole):
            status = _call(clients[role], world, method, route, ids)
            if (role in ROLES[action]) == (status in REFUSED):
                wrong.append((method, route, role.value, status))
    assert not wrong


def test_each_scope_may_do_what_the_matrix_says_and_nothing_else() -> None:
    world = make_world()
    clients = {scope: client_of(make_key(world.project, scope)[1]) for scope in Scope}
    wrong = []
    ids = _ids(world)
    for (method, route), action in MATRIX.items():
        for scope in Scope:
            status = _call(clients[scope], world, method, route, ids)
            if (scope in SCOPES[action]) == (status in REFUSED):
                wrong.append((method, route, scope.value, status))
    assert not wrong


def test_strangers_get_401_and_members_of_other_projects_404_everywhere() -> None:
    world = make_world()
    other = make_world()
    ids = _ids(world)
    nobody, owner, key = client_of(), client_of(make_user(other.project)), client_of(make_key(other.project)[1])
    for method, route in MATRIX:
        assert _call(nobody, world, method, route, ids) == 401, (method, route)
        assert _call(owner, world, method, route, ids) == 404, (method, route)
        assert _call(key, world, method, route, ids) == 404, (method, route)


def test_objects_of_another_project_are_not_found_below_ones_own() -> None:
    world, other = make_world(), make_world()
    ids = _ids(other)
    client = client_of(make_user(world.project))
    ids["runs"] = other.run.pk
    assert len(ids) == 14
    for method, route in MATRIX:
        if "<uuid:id>" not in route or route.split("/")[2] not in ids:
            continue
        path = _path(world, route, ids).replace(str(world.run.pk), str(other.run.pk))
        body = _body(world, route) if method == "POST" else None
        response = getattr(client, method.lower())(path, body, format="json")
        assert response.status_code == 404, (method, route, response.content)


def test_a_pin_to_another_projects_version_is_refused() -> None:
    world, other = make_world(), make_world()
    client = client_of(make_user(world.project))
    path = f"{world.base}/replicas/{world.replica.pk}/pin"
    response = client.post(path, {"version": str(other.version.pk), "reason": "x"}, format="json")
    assert (response.status_code, response.json()["field"]) == (422, "version")


def test_the_matrix_itself() -> None:
    """Written out once more: a change of who may do what is made in two places, on purpose."""
    roles = {role: {action for action in Action if allowed(role.value, action)} for role in MemberRole}
    assert roles[MemberRole.VIEWER] == {READ}
    assert roles[MemberRole.REVIEWER] == roles[MemberRole.VIEWER] | {
        Action.RUBRICS_PUBLISH,
        Action.RELEASES_APPROVE,
        Action.RELEASES_ABORT,
        Action.FEEDBACK_SEND,
        Action.FEEDBACK_RETRACT,
        Action.GATEWAY_CALL,
    }
    assert roles[MemberRole.ENGINEER] == roles[MemberRole.REVIEWER] | {
        Action.CATALOG_WRITE,
        Action.RUNS_CONTROL,
        Action.FLEET_CONTROL,
        Action.WEIGHTS_EXPORT,
        Action.REPLICA_ENROL,
        Action.WORK_REPLAY,
        Action.LANES_MANAGE,
        Action.RELEASES_PROPOSE,
    }
    assert roles[MemberRole.OWNER] == set(Action)
    scopes = {scope: {action for action in Action if allowed([scope.value], action)} for scope in Scope}
    assert scopes == {
        Scope.READ: {READ},
        Scope.RUNS: {READ, Action.CATALOG_WRITE, Action.RUNS_CONTROL, Action.WORK_REPLAY},
        Scope.RELEASES: {READ, Action.LANES_MANAGE, Action.RELEASES_PROPOSE, Action.RELEASES_ABORT},
        Scope.RUBRICS: {READ, Action.RUBRICS_PUBLISH},
        Scope.FLEET: {READ, Action.FLEET_CONTROL, Action.WORK_REPLAY},
        Scope.EXPORT: {READ, Action.WEIGHTS_EXPORT},
        Scope.ADMIN: {READ, MANAGE, Action.USERS_ERASE},
        Scope.FEEDBACK: {Action.FEEDBACK_SEND, Action.FEEDBACK_RETRACT},
        Scope.GATEWAY: {Action.GATEWAY_CALL},
        Scope.REPLICA: {Action.REPLICA_ENROL},
    }


@pytest.mark.parametrize("action", Action)
def test_unknown_roles_and_scopes_permit_nothing(action: Action) -> None:
    assert not allowed("emperor", action)
    assert not allowed(["emperor"], action)
    assert not allowed([], action)
