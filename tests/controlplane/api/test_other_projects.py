"""What belongs to a lane of another project does not exist below one's own, whatever its id or name."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from controlplane.models import Alert, AlertHook, Feedback, FeedbackSource, RejectedPayload, SignalDefinition
from controlplane.states import AlertKind, ReleaseState
from tests.controlplane.api.api_factories import client_of, make_project, make_user
from tests.controlplane.api.test_permission_matrix import MATRIX
from tests.domain_factories import make_row

pytestmark = pytest.mark.django_db

BODIES: dict[str, dict[str, Any]] = {
    "erase": {"user": "u", "reason": "x"},
    "withdraw-consent": {"user": "u", "reason": "x"},
    "train": {"name": "x"},
    "cadence": {"cadence": {}, "reason": "x"},
    "recording": {"record_share": 1.0, "redactions": {}, "reason": "x"},
    "keys": {"name": "x"},
    "configure": {"trust_weight": 1.0, "reason": "x"},
}


def test_nothing_of_another_projects_lane_is_found() -> None:
    release = make_row(ReleaseState, ReleaseState.CANARY)
    theirs = release.lane.project
    signal = SignalDefinition.objects.create(project=theirs, slug="thumbs", value_type="boolean")
    kept = {"signal": signal, "target_kind": "generation", "target_id": "x", "occurred_at": timezone.now()}
    ids = {
        "releases": release.pk,
        "alerts": Alert.objects.create(project=theirs, kind=AlertKind.ORPHANS, subject="x", detail={}).pk,
        "alert-hooks": AlertHook.objects.create(project=theirs, url="https://hooks.example/x").pk,
        "feedback": Feedback.objects.create(project=theirs, sender="s", state="joined", **kept).pk,
        "rejected-payloads": RejectedPayload.objects.create(project=theirs, sender="s", body="{}", code="c").pk,
    }
    slugs = {"lanes": release.lane.slug, "sources": FeedbackSource.objects.create(project=theirs, slug="app").slug}
    mine = make_project()
    client = client_of(make_user(mine))
    asked = 0
    for method, route in MATRIX:
        segment = route.split("/")[2] if route.count("/") >= 2 else ""
        path = f"/api/v1/{route}".replace("<slug:project>", mine.slug)
        if segment not in {**ids, **slugs} or "<" not in path:
            continue
        path = path.replace("<uuid:id>", str(ids.get(segment))).replace("<slug:slug>", slugs.get(segment, ""))
        body = BODIES.get(path.rsplit("/", 1)[-1], {"reason": "x"})
        if path.endswith("lanes/lane/rollback"):
            body = {"version": str(release.version_id), "reason": "x"}
        answer = client.post(path, body, format="json") if method == "POST" else client.get(path)
        assert answer.status_code == 404, (method, route, answer.content)
        asked += 1
    assert asked >= 30
