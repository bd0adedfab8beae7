"""Two people ship a version: one proposes, the other approves and promotes, and rolls back."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from controlplane.conductor.shipping import release_advance
from controlplane.models import Lane, Release, Replica, ReplicaSlot, Run, ServedVersion, Transfer
from controlplane.services.evaluations import evaluation_advance
from controlplane.services.events import CONDUCTOR, SYSTEM
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.lanes import lane_create
from controlplane.services.runs import run_move
from controlplane.states import EvaluationState, ReleaseState, ReplicaState, RunState, TransferState
from rl_core.types import ClusterRole
from tests.browser.conftest import Backstage, Watched
from tests.factories import Workspace
from tests.playing import play, play_group, receive, start_run

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True)]


class _Fixed:
    """Luck that is always the same."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def open_lane(workspace: Workspace) -> Lane:
    """A lane on a serving cluster whose replica holds the promoted version."""
    run = play(start_run(workspace, name="Candidate maker", steps=1), 1)
    run_move(run=run, to=RunState.COMPLETED, actor=CONDUCTOR, reason="", finished_at=run.started_at)
    model = run.lineage.model
    cluster = cluster_create(
        project=workspace.project,
        slug="serving",
        role=ClusterRole.SERVING,
        region="eu-central",
        capacity=8,
        model=model,
        actor=SYSTEM,
    )
    replica = replica_register(
        cluster=cluster,
        name="engine-1",
        inference_url="http://127.0.0.1:1",
        control_url="http://127.0.0.1:2",
        weight_slots=2,
        actor=SYSTEM,
    )
    Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY)
    lane = lane_create(project=workspace.project, slug="assistant", cluster=cluster, model=model, actor=SYSTEM)
    lane.refresh_from_db()
    ReplicaSlot.objects.filter(replica=replica, slot="default").update(
        desired_version=lane.promoted_version, current_version=lane.promoted_version
    )
    return lane


def pass_the_gate(lane: Lane) -> Release:
    """What the conductor, the transfer worker and the rollout workers do for a release: the candidate is better."""
    release = Release.objects.get(lane=lane, state=ReleaseState.PENDING)
    release_advance(release=release)
    for transfer in Transfer.objects.filter(replica__cluster=lane.cluster, state=TransferState.PENDING):
        receive(transfer)
    release.refresh_from_db()
    release_advance(release=release)
    release.refresh_from_db()
    for evaluation, luck in ((release.candidate_evaluation, 0.0), (release.incumbent_evaluation, 1.0)):
        assert evaluation is not None
        if evaluation.state == EvaluationState.DONE:  # the run asked the same question at its end
            continue
        evaluation_advance(evaluation.pk)
        for group in evaluation.groups.all():
            play_group(group, skill=0.5, luck=_Fixed(luck))  # type: ignore[arg-type]
        evaluation_advance(evaluation.pk)
    release.refresh_from_db()
    return release_advance(release=release)


def give_reason(watched: Watched, reason: str, button: str) -> None:
    watched.page.get_by_label("Reason").fill(reason)
    watched.page.get_by_role("button", name=button).click()


def test_one_proposes_another_promotes_and_rolls_back(
    watched: Watched, workspace: Workspace, backstage: Backstage
) -> None:
    page = watched.page
    lane = backstage(lambda: open_lane(workspace))
    candidate = backstage(lambda: Run.objects.get(name="Candidate maker").lineage.head)
    address = f"/lanes/{lane.pk}/"

    watched.login(workspace.people["engineer"].username)
    watched.open(address)
    page.get_by_role("link", name="Propose").click()
    give_reason(watched, "better on word problems", "Propose")
    expect(page.get_by_role("heading", name="Release of")).to_be_visible()
    release = backstage(lambda: pass_the_gate(lane))
    assert release.gate["verdict"] == "pass"
    watched.open(address)
    expect(page.locator("#lane-release")).to_contain_text("pass")
    page.get_by_role("link", name="Promote").click()
    give_reason(watched, "mine", "Promote")
    expect(page.get_by_role("alert")).to_contain_text("1 approval(s) of others than the proposer are needed")
    watched.forgive("409 (Conflict)")
    watched.logout()

    watched.login(workspace.people["reviewer"].username)
    watched.open(address)
    page.get_by_role("link", name="Approve").click()
    give_reason(watched, "the gate is clear", "Approve")
    expect(page.get_by_role("status").filter(has_text="has your approval")).to_be_visible()
    page.get_by_role("link", name="Promote").click()
    give_reason(watched, "ship it", "Promote")
    expect(page.get_by_role("status").filter(has_text="answers all users of the lane now")).to_be_visible()
    backstage(lane.refresh_from_db)
    assert lane.promoted_version_id == candidate.pk
    page.locator("#lane-shipping").get_by_role("link", name="Roll back").click()
    expect(page.get_by_role("dialog")).to_contain_text("Quarantined")
    give_reason(watched, "users complain", "Roll back")
    expect(page.locator("#lane-shipping")).to_contain_text("rolled back")
    backstage(lane.refresh_from_db)
    assert lane.promoted_version_id != candidate.pk
    served = backstage(
        lambda: list(ServedVersion.objects.filter(lane=lane).order_by("pk").values_list("version", flat=True))
    )
    assert served == [lane.promoted_version_id, candidate.pk, lane.promoted_version_id]
