"""Cadence, slots, releases, alerts and hooks over the API: who may, what is refused, what is shown once."""

from __future__ import annotations

from typing import Any

import pytest
from rest_framework.test import APIClient

from controlplane.models import Alert, Lane, Release, ReplicaSlot, User
from controlplane.services.alerts import alert_raise
from controlplane.services.tenancy import membership_set
from controlplane.states import AlertKind, MemberRole, ReleaseState
from tests.controlplane.api.api_factories import client_of, make_key
from tests.lane_rows import ACTOR, person
from tests.shipping_rig import Users, cadence_spec, make_run, put_in, shipping_world, to_canary

pytestmark = pytest.mark.django_db


class Api:
    """A lane with a cadence and people, reached over the API alone."""

    def __init__(self) -> None:
        self.world = shipping_world()
        self.base = f"/api/v1/projects/{self.world.project.slug}"
        self.people: dict[str, User] = {}

    def client(self, name: str = "ann", role: MemberRole = MemberRole.ENGINEER) -> APIClient:
        if name not in self.people:
            self.people[name] = person(name)
            membership_set(project=self.world.project, user=self.people[name], role=role, actor=ACTOR)
        return client_of(self.people[name])

    def post(self, path: str, body: dict[str, Any] | None = None, *, by: str = "ann", **options: Any) -> Any:
        return self.client(by, **options).post(f"{self.base}/{path}", body or {"reason": "because"}, format="json")

    def get(self, path: str, *, by: str = "ann") -> Any:
        return self.client(by).get(f"{self.base}/{path}")


@pytest.fixture
def api() -> Api:
    return Api()


def test_the_cadence_is_read_and_set_with_the_revision_that_was_seen(api):
    seen = api.get("lanes/assistant/cadence").json()
    assert seen["cadence"]["canary"]["steps"] == [0.2, 0.5]
    assert (seen["interval_s"], seen["next_slot_at"], seen["slot"], seen["feedback_delays"]) == (0.0, None, None, 0)
    body = {
        "cadence": cadence_spec(interval_s=600.0),
        "reason": "every ten minutes",
        "expected_revision": seen["revision"],
    }
    changed = api.post("lanes/assistant/cadence", body)
    assert (changed.status_code, changed.json()["interval_effective_s"]) == (200, 600.0)
    stale = api.post("lanes/assistant/cadence", body)
    assert (stale.status_code, stale.json()["code"]) == (412, "stale_revision")
    wrong = api.post("lanes/assistant/cadence", {"cadence": {"intervall_s": 3}, "reason": "x"})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "cadence")
    assert "intervall_s" in wrong.json()["detail"]
    assert api.get("cadence-schema").json()["$defs"]["CadenceSpec"]["properties"]["interval_s"]


def test_a_slot_is_run_now_shown_and_skipped(api):
    opened = api.post("lanes/assistant/run-now")
    assert (opened.status_code, opened.json()["slot"]["state"]) == (200, "open")
    again = api.post("lanes/assistant/run-now")
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    skipped = api.post("lanes/assistant/skip", {"reason": "not today"})
    assert skipped.json()["slot"] is None
    [row] = api.get("lanes/assistant/slots").json()["results"]
    assert (row["number"], row["state"], row["reason"]) == (1, "skipped", "not today")
    assert api.post("lanes/assistant/pause").status_code == 200
    assert api.post("lanes/assistant/pause").status_code == 409
    assert api.post("lanes/assistant/resume").json()["paused_at"] is None


def test_two_people_ship_over_the_api(api):
    run = make_run(api.world)
    proposed = api.post("releases", {"lane": "assistant", "run": str(run.pk), "reason": "better"})
    assert (proposed.status_code, proposed.json()["state"]) == (201, "pending")
    release = to_canary(api.world, Release.objects.get(pk=proposed.json()["id"]))
    path = f"releases/{release.pk}"
    assert api.post(f"{path}/approve").status_code == 403  # one's own
    stepped = api.post(f"{path}/advance", {"reason": "on", "expected_revision": release.revision})
    assert (stepped.status_code, stepped.json()["share"]) == (200, 0.5)
    stale = api.post(f"{path}/pause", {"reason": "x", "expected_revision": release.revision})
    assert (stale.status_code, stale.json()["code"]) == (412, "stale_revision")
    assert api.post(f"{path}/pause").json()["paused_from"] == "canary"
    assert api.post(f"{path}/resume").json()["state"] == "canary"
    steps = api.get(f"{path}/steps").json()["results"]
    assert [(row["position"], row["share"], row["verdict"]) for row in steps] == [(1, 0.5, None), (0, 0.2, None)]
    refused = api.post(f"{path}/promote", by="bob", role=MemberRole.REVIEWER)
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    release.steps.filter(position=1).update(verdict="pass")
    assert api.post(f"{path}/approve", by="bob").status_code == 200
    assert api.post(f"{path}/promote", by="bob").json()["state"] == "promoted"
    first = str(release.incumbent_id)
    back = api.post("lanes/assistant/rollback", {"version": first, "reason": "complaints"}, by="bob")
    assert (back.status_code, back.json()["promoted_version"]["id"]) == (200, first)
    assert api.get(path).json()["outcome"] == "complaints"


def test_who_made_a_key_does_not_approve_what_it_proposes(api):
    owner = api.client("ann", MemberRole.OWNER)
    admin = owner.post(f"{api.base}/keys", {"name": "admin", "scopes": ["admin"]}, format="json").json()["key"]
    made = client_of(admin).post(f"{api.base}/keys", {"name": "ci", "scopes": ["releases"]}, format="json").json()
    assert made["created_by"] == api.people["ann"].username
    body = {"lane": "assistant", "run": str(make_run(api.world).pk), "reason": "better"}
    proposed = client_of(made["key"]).post(f"{api.base}/releases", body, format="json")
    assert proposed.status_code == 201
    path = f"releases/{proposed.json()['id']}"
    assert api.post(f"{path}/approve", by="ann").status_code == 403
    assert api.post(f"{path}/approve", by="bob", role=MemberRole.REVIEWER).status_code == 200


def test_an_analysis_is_shown_as_it_was_kept(api):
    from controlplane.conductor.shipping import look_at_canaries

    release = to_canary(api.world)
    users = Users(api.world)
    for number in range(40):
        users.ask(f"u{number}")
    look_at_canaries()
    step = api.get(f"releases/{release.pk}/steps").json()["results"][-1]
    analysis = step["analysis"]
    assert (step["verdict"], analysis["verdict"]) == ("undecided", "undecided")
    assert analysis["effects"]["reward"]["difference"] is None
    assert sum(analysis["matured"].values()) == 40
    assert analysis["exposures"][0][1] == 0.2


def test_which_version_answered_a_user_at_a_time(api):
    release = to_canary(api.world)
    generation = None
    users = Users(api.world)
    for number in range(60):
        generation = users.ask(f"u{number}")
        if generation.arm == "canary":
            break
    assert generation is not None
    generation.refresh_from_db()
    at = generation.created_at.isoformat().replace("+00:00", "Z")
    told = api.get(f"lanes/assistant/served-at?at={at}&user=u{number}").json()
    assert (told["arm"], told["version"]["id"]) == ("canary", str(release.version_id))
    assert api.get(f"lanes/assistant/served-at?at={at}").json()["arm"] == "promoted"
    assert api.get(f"lanes/assistant/served-at?at={at}&user={'x' * 201}").status_code == 422


def test_alerts_are_listed_and_resolved_by_a_person(api):
    alert = alert_raise(
        lane=api.world.lane, kind=AlertKind.BEHAVIOUR, subject="refusal", detail={"reason": "it rose"}, holds=True
    )
    assert alert is not None
    [row] = api.get("alerts?open=true&kind=behaviour").json()["results"]
    assert (row["subject"], row["holds"], row["lane"], row["resolved_at"]) == ("refusal", True, "assistant", None)
    assert api.get("lanes/assistant/cadence").json()["hold_reason"] == "behaviour alert on refusal"
    key = client_of(make_key(api.world.project)[1])
    assert key.post(f"{api.base}/alerts/{alert.pk}/resolve", {"reason": "x"}, format="json").status_code == 403
    done = api.post(f"alerts/{alert.pk}/resolve", {"reason": "a fluke"}, by="bob", role=MemberRole.REVIEWER)
    assert (done.status_code, done.json()["resolution"]) == (200, "a fluke")
    assert api.post(f"alerts/{alert.pk}/resolve", by="bob").status_code == 409
    assert api.get("alerts?open=true").json()["results"] == []
    assert api.get("lanes/assistant/cadence").json()["hold_reason"] == ""


def test_a_hooks_secret_is_shown_once_and_its_deliveries_are_listed(api):
    made = api.post("alert-hooks", {"url": "https://hooks.example/x"})
    assert made.status_code == 201
    assert made.json()["secret"].startswith("whsec_")
    assert "secret" not in api.get("alert-hooks").json()["results"][0]
    alert = alert_raise(lane=api.world.lane, kind=AlertKind.BEHAVIOUR, subject="refusal", detail={})
    assert alert is not None
    [delivery] = api.get(f"alerts/{alert.pk}/deliveries").json()["results"]
    assert (delivery["hook"], delivery["delivered_at"]) == (made.json()["id"], None)
    off = api.post(f"alert-hooks/{made.json()['id']}/disable", {"reason": "moved"})
    assert off.json()["disabled_at"] is not None
    for url in ("http://hooks.example/x", "https://169.254.169.254/latest"):
        refused = api.post("alert-hooks", {"url": url})
        assert (refused.status_code, refused.json()["field"]) == (422, "url")


def test_rolling_back_needs_a_version_of_the_project_and_one_person(api):
    release = put_in(_resident(api), ReleaseState.PROMOTED)
    other = Api()
    foreign = {"version": str(other.world.lane.promoted_version_id), "reason": "x"}
    assert api.post("lanes/assistant/rollback", foreign).status_code == 404
    never = api.post("lanes/assistant/rollback", {"version": str(make_run(api.world).lineage.head_id), "reason": "x"})
    assert never.status_code == 409
    viewer = api.post(
        "lanes/assistant/rollback",
        {"version": str(release.incumbent_id), "reason": "x"},
        by="eve",
        role=MemberRole.VIEWER,
    )
    assert viewer.status_code == 403
    done = api.post("lanes/assistant/rollback", {"version": str(release.incumbent_id), "reason": "x"})
    assert done.json()["promoted_version"]["id"] == str(release.incumbent_id)
    assert Alert.objects.count() == 0
    assert Lane.objects.get(pk=api.world.lane.pk).revision > api.world.lane.revision


def _resident(api: Api) -> Release:
    from tests.shipping_rig import propose

    release = propose(api.world)
    ReplicaSlot.objects.filter(replica=api.world.replica, slot="candidate").update(current_version=release.version)
    return release
