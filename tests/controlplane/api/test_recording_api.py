"""What a lane keeps of content, over the API: read, set with the revision that was seen, checked before it is set."""

from __future__ import annotations

import pytest

from controlplane.models import Event, Lane
from controlplane.services.tenancy import membership_set
from controlplane.states import EventType, MemberRole
from tests.controlplane.api.api_factories import client_of
from tests.lane_rows import ACTOR, lane_world, person

pytestmark = pytest.mark.django_db

EMAIL = r"[\w.]+@[\w.]+\w"


@pytest.fixture
def recording():
    """The endpoint of a lane, as its engineer calls it."""
    world = lane_world()
    user = person("ann")
    membership_set(project=world.project, user=user, role=MemberRole.ENGINEER, actor=ACTOR)
    client, path = client_of(user), f"/api/v1/projects/{world.project.slug}/lanes/assistant/recording"

    def call(body=None):
        return client.get(path) if body is None else client.post(path, body, format="json")

    return call


def body(**changes):
    return {"record_share": 0.25, "redactions": {"email": EMAIL}, "reason": "privacy", **changes}


def test_what_is_kept_is_read_and_set_with_the_revision_that_was_seen(recording):
    seen = recording().json()
    before = seen["revision"]
    assert seen == {"record_share": 1.0, "redactions": {}, "revision": before}
    done = recording(body(expected_revision=before))
    assert (done.status_code, done.json()["revision"]) == (200, before + 1)
    lane = Lane.objects.get()
    assert (lane.record_share, lane.redactions) == (0.25, {"email": EMAIL})
    event = Event.objects.filter(type=EventType.LANE_CHANGED).latest("seq")
    assert (event.reason, event.data["change"], event.data["redactions"]) == ("privacy", "recording set", ["email"])
    stale = recording(body(expected_revision=before))
    assert (stale.status_code, stale.json()["code"]) == (412, "stale_revision")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"redactions": {"email": "("}}, "redactions.email"),
        ({"redactions": {"all": ".*"}}, "redactions.all"),
        ({"redactions": {"No name": "a"}}, "redactions"),
        ({"record_share": 1.5}, "record_share"),
        ({"reason": ""}, "reason"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(recording, changes, field):
    before = recording().json()
    refused = recording(body(**changes))
    assert (refused.status_code, refused.json()["field"]) == (422, field)
    assert recording().json() == before
