"""The demonstration's logins: made once, kept, and nobody else's taken over."""

import pytest

from controlplane.models import User
from controlplane.processes.errors import ServiceFailed
from controlplane.processes.seed import PEOPLE, _people
from controlplane.states import MemberRole
from tests.domain_factories import make_project

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def state(settings, tmp_path):
    settings.STATE_DIR = tmp_path
    return tmp_path


def test_logins_are_made_once_and_last_for_as_long_as_their_file(state):
    project = make_project()
    first = _people(project)
    assert _people(project) == first
    assert (state / "demo_logins.json").stat().st_mode & 0o777 == 0o600
    for name, role in PEOPLE.items():
        user = User.objects.get(username=name)
        assert user.check_password(first[name])
        assert user.memberships.get().role == role
    (state / "demo_logins.json").unlink()
    second = _people(project)
    assert second["engineer"] != first["engineer"]
    assert User.objects.get(username="engineer").check_password(second["engineer"])


def test_somebody_elses_login_is_left_alone():
    theirs = User.objects.create_user("reviewer", password="a password of their own")
    theirs.memberships.create(project=make_project(), role=MemberRole.OWNER)
    with pytest.raises(ServiceFailed, match="user 'reviewer' who is no member"):
        _people(make_project())
    theirs.refresh_from_db()
    assert theirs.check_password("a password of their own")
    assert theirs.memberships.count() == 1
