"""Graders elsewhere, in the score queue: what they may reach, secrets by name, failures that are no scores."""

from __future__ import annotations

import json
import random
from ipaddress import ip_network

import pytest

from controlplane.models import CriterionScore, RolloutGroup, WorkUnit
from controlplane.selectors.graders import graders_of
from controlplane.services.catalog import rubric_publish
from controlplane.services.events import CONDUCTOR
from controlplane.states import GroupState, WorkKind, WorkState
from rl_core.environments.criteria.outside import Secret
from rl_core.errors import GraderRefused
from tests.factories import furnish, make_workspace
from tests.playing import admit, roll_out, start_run
from tests.rl_core.environments.criteria.grading_rig import serving
from tests.simulated_workers import due
from workers import score
from workers.base import work_on

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "whsec_" + "c2xpcHdheS1ncmFkZXItc2VjcmV0LTAx"


def waiting_group(url: str) -> RolloutGroup:
    """A group that waits to be scored by a remote grader."""
    workspace = furnish(make_workspace())
    criterion = {"key": "asked", "text": "t", "kind": "remote", "weight": 1, "params": {"url": url, "secret": "hook"}}
    rubric = rubric_publish(
        project=workspace.project, slug="asked", criteria=[criterion], author=None, note="", actor=CONDUCTOR
    )
    run = start_run(workspace)
    stage = run.stages.get(position=0)
    stage.rubric_version = rubric
    stage.save()
    group = admit(run, stage)[0]
    roll_out(group, skill=0.5, luck=random.Random(1))
    return group


def score_once(group: RolloutGroup) -> WorkUnit:
    unit = WorkUnit.objects.get(kind=WorkKind.SCORE, ref=group.pk)
    due(unit)
    work_on(unit.pk, score.score)
    unit.refresh_from_db()
    group.refresh_from_db()
    return unit


@pytest.fixture
def operator(settings, tmp_path):
    """Lets graders reach loopback, and writes secrets down."""
    settings.GRADER_NETWORKS = [ip_network("127.0.0.0/8")]
    settings.GRADER_SECRETS = tmp_path / "graders.json"

    def write(**secrets):
        settings.GRADER_SECRETS.touch(mode=0o600)
        settings.GRADER_SECRETS.write_text(json.dumps(secrets))

    return write


def test_a_remote_grader_scores_a_group_and_its_failures_are_tried_again(operator):
    answers = [(500, b"")] * 4
    with serving(lambda body: answers.pop() if answers else (200, b'{"value": 0.25, "reason": "so"}')) as server:
        operator(hook={"value": SECRET, "origin": server.url})
        group = waiting_group(f"{server.url}/grade")
        unit = score_once(group)
        assert (unit.state, group.state) == (WorkState.QUEUED, GroupState.SCORING)
        assert set(CriterionScore.objects.values_list("value", flat=True)) == {None}
        assert "answered 500" in CriterionScore.objects.first().error
        unit = score_once(group)
        assert (unit.state, group.state) == (WorkState.DONE, GroupState.READY)
        assert set(CriterionScore.objects.values_list("value", "error")) == {(0.25, "")}
        assert group.mean_reward == 0.25


def test_what_no_retry_mends_ends_the_unit_with_its_reason(operator):
    operator(other={"value": SECRET, "origin": "https://elsewhere.example"})
    group = waiting_group("http://127.0.0.1:9/grade")
    unit = score_once(group)
    assert unit.state == WorkState.DEAD
    assert "no grader secret named 'hook'" in unit.error
    assert unit.attempts.get().error_code == "grader_refused"


def test_a_project_has_the_secrets_that_the_operator_gave_it(operator, settings):
    project = make_workspace(slug="acme").project
    operator(
        all={"value": "a", "origin": "https://judge.example"},
        ours={"value": "b", "origin": "https://judge.example", "projects": ["acme"]},
        theirs={"value": "c", "origin": "https://judge.example", "projects": ["other"]},
    )
    outside = graders_of(project)
    assert set(outside.secrets) == {"all", "ours"}
    assert outside.secrets["ours"] == Secret(value="b", origin="https://judge.example", projects=("acme",))
    assert list(outside.reach.networks) == settings.GRADER_NETWORKS
    settings.GRADER_SECRETS.chmod(0o644)
    with pytest.raises(GraderRefused, match="chmod"):
        graders_of(project)
    settings.GRADER_SECRETS.chmod(0o600)
    for broken in ("[]", '{"a": {"value": "x"}}', '{"a": {"value": "x", "origin": "judge.example"}}'):
        settings.GRADER_SECRETS.write_text(broken)
        with pytest.raises(GraderRefused, match="cannot be read"):
            graders_of(project)
    settings.GRADER_SECRETS = None
    assert graders_of(project).secrets == {}
