"""Retention: nothing that somebody may ask for goes, whatever happened before; everything else does."""

import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.utils import timezone

from controlplane.errors import Conflict
from controlplane.models import (
    Evaluation,
    Lane,
    PolicyVersion,
    Publication,
    Release,
    Replica,
    ReplicaSlot,
    RubricVersion,
    Run,
    ServedVersion,
    Step,
    TaskSet,
    Transfer,
)
from controlplane.selectors.versions_needed import NEEDS, versions_needed
from controlplane.services import retention
from controlplane.services.exports import version_export
from controlplane.services.retention import publications_release, version_hold, versions_retire
from controlplane.services.runs import run_create
from controlplane.services.versions import PublishedWeights, version_begin, version_commit
from controlplane.states import PublicationKind, ReleaseState, RunState
from rl_core.types import WeightFormat
from tests.domain_factories import TESTER, make_cluster, make_run, make_spec


@pytest.fixture(autouse=True)
def few(settings, monkeypatch):
    """Nothing is kept for its age alone."""
    settings.RETENTION_VERSIONS, settings.SKIP_DELTAS = 0, []
    monkeypatch.setattr("controlplane.selectors.versions_needed._SLACK", 0)


def grow(run, count):
    """Commit `count` versions after the head; all of them, the head before them first."""
    run.lineage.refresh_from_db()
    versions = [run.lineage.head]
    for _ in range(count):
        head = versions[-1]
        begun = version_begin(lineage=run.lineage, epoch=0, number=head.number + 1, parent=head, fence=1)
        weights = PublishedWeights(
            root=f"{begun.pk.int:064x}"[-64:],
            manifest_key=f"lineages/{run.lineage_id}/0-{begun.number}/1/manifest.json",
            delta_bytes=10,
            full_bytes=1000,
            changed_elements=1,
            elements=500,
        )
        versions.append(version_commit(version=begun, fence=1, weights=weights, run=run, actor=TESTER))
    return versions


@pytest.fixture
def ended():
    """Versions of a run that ended: its first, one in the middle, its head."""
    run = make_run()
    versions = grow(run, 2)
    Run.objects.filter(pk=run.pk).update(state=RunState.COMPLETED)
    return versions


def slot(version):
    return ReplicaSlot.objects.filter(replica__cluster__project=version.lineage.project)


def lane_of(version, **values):
    cluster = make_cluster(version.lineage.project, slug="serving")
    return Lane.objects.create(
        project=version.lineage.project, slug="chat", cluster=cluster, model=version.lineage.model, salt="s", **values
    )


def transfer(of, /, **values):
    replica = Replica.objects.filter(cluster__project=of.lineage.project).first()
    row = {"replica": replica, "slot": "default", "version": of.lineage.head, "state": "pending"}
    Transfer.objects.create(**{**row, **values})


def evaluation(version):
    project = version.lineage.project
    Evaluation.objects.create(
        project=project,
        version=version,
        task_set=TaskSet.objects.get(project=project),
        rubric_version=RubricVersion.objects.get(rubric__project=project),
        task_count=3,
    )


def release(of, /, **values):
    lane = lane_of(of)
    row = {"lane": lane, "version": of.lineage.head, "reason": "r", "state": ReleaseState.CANARY}
    Release.objects.create(**{**row, **values})


def served(version, *, days_ago):
    until = timezone.now() - timedelta(days=days_ago) if days_ago else None
    ServedVersion.objects.create(lane=lane_of(version), version=version, until=until)


def again_running(version):
    Run.objects.filter(lineage=version.lineage_id).update(state=RunState.RUNNING, checkpoint_step=100)


def training_from(version):
    again_running(version)
    run = Run.objects.get(lineage=version.lineage_id)
    Step.objects.create(run=run, stage=run.stages.get(), number=9, base_version=version)


def recent_checkpoint(version):
    again_running(version)
    Run.objects.filter(lineage=version.lineage_id).update(checkpoint_step=3)


def newest(version, settings):
    again_running(version)
    settings.RETENTION_VERSIONS = 2


def planned(of, /, **values):
    row = {"version": of.lineage.head, "base_version": None, "kind": PublicationKind.SKIP}
    Publication.objects.create(**{**row, **values})


def being_published(version):
    version_begin(lineage=version.lineage, epoch=7, number=5, parent=version, fence=1)


def fork(version):
    return run_create(project=version.lineage.project, name="f", spec=make_spec(), actor=TESTER, parent_version=version)


def export_of(version: PolicyVersion) -> None:
    version_export(version=version, weight_format=WeightFormat.BF16, actor=TESTER, reason="for a customer")


MIDDLE = {
    "held by a replica": lambda v: slot(v).update(current_version=v),
    "wanted on a replica": lambda v: slot(v).update(desired_version=v),
    "in a transfer": lambda v: transfer(v, version=v),
    "under evaluation": evaluation,
    "answers a lane's users": lambda v: lane_of(v, promoted_version=v),
    "in a lane's rollback window": lambda v: served(v, days_ago=3),
    "answered users: for the audit": lambda v: served(v, days_ago=400),
    "in a release": lambda v: release(v, version=v),
    "to be exported": export_of,
    "a step trains from it": training_from,
    "since a checkpoint of its run": recent_checkpoint,
    "a publication of it is being made": lambda v: planned(v, version=v),
    "being published": being_published,
}
FURTHER = {
    "the start of a transfer": lambda v: transfer(v, from_version=v),
    "an incumbent": lambda v: release(v, incumbent=v),
    "a rollback that waits": lambda v: lane_of(v, rollback_to=v),
    "the base of a skip-delta": lambda v: planned(v, base_version=v),
}


@pytest.mark.django_db
@pytest.mark.parametrize("use", [*MIDDLE, *FURTHER])
def test_a_version_that_somebody_needs_stays(ended, use):
    middle = ended[1]
    {**MIDDLE, **FURTHER}[use](middle)
    if use in MIDDLE:
        assert use in versions_needed([middle.pk])[middle.pk]
    versions_retire()
    middle.refresh_from_db()
    assert middle.retired_at is None


@pytest.mark.django_db
def test_each_reason_has_its_case(ended, settings):
    first, middle, head = ended
    assert versions_needed() == {head.pk: ["head of its lineage"]}
    again_running(middle)
    assert versions_needed([first.pk]) == {first.pk: ["the run began from it"]}
    newest(middle, settings)
    assert versions_needed([middle.pk]) == {middle.pk: ["among the newest of a run"]}
    known = {*MIDDLE, "head of its lineage", "the run began from it", "among the newest of a run"}
    assert {need.reason for need in NEEDS} == known


@pytest.mark.django_db
def test_nobodys_versions_are_retired_and_what_led_to_them_alone_is_let_go(ended):
    first, _, head = ended
    Publication.objects.create(
        version=head,
        base_version=first,
        kind=PublicationKind.SKIP,
        root=head.root,
        base_root=first.root,
        manifest_key="skip/manifest.json",
        bytes=15,
        published_at=Now(),
    )
    assert versions_retire() == 2
    assert publications_release() == 2
    left = Publication.objects.filter(deleted_at__isnull=True).order_by("bytes")
    # The head is reached over the model's snapshot and the skip; the version between led there for more.
    assert [row.manifest_key for row in left] == ["skip/manifest.json", first.manifest_key]
    assert (versions_retire(), publications_release()) == (0, 0)


@pytest.mark.django_db
def test_a_version_that_is_out_of_use_serves_as_a_step_on_the_way(ended):
    middle = ended[1]
    versions_retire()
    publications_release()
    middle.refresh_from_db()
    assert middle.retired_at is not None
    assert middle.publications.get().deleted_at is None


@pytest.mark.django_db
def test_the_audit_may_be_bounded(ended, settings):
    middle = ended[1]
    served(middle, days_ago=400)
    settings.AUDIT_DAYS = 399
    versions_retire()
    middle.refresh_from_db()
    assert middle.retired_at is not None


@pytest.mark.django_db
def test_a_retired_version_is_refused_to_whoever_wants_it(ended):
    _, middle, head = ended
    versions_retire()
    with transaction.atomic(), pytest.raises(Conflict, match="retired"):
        version_hold(middle)
    with pytest.raises(Conflict, match="retired"):
        fork(middle)
    with pytest.raises(Conflict, match="retired"):
        export_of(middle)
    with transaction.atomic():
        version_hold(head)


@pytest.mark.django_db
def test_a_fork_keeps_the_weights_of_a_parent_that_is_retired(ended):
    middle = ended[1]
    branch = fork(middle)
    grown = grow(branch, 1)
    versions_retire()
    publications_release()
    middle.refresh_from_db()
    assert middle.retired_at is not None
    assert middle.publications.get().deleted_at is None  # the fork's first version has these weights
    assert grown[0].root == middle.root


@pytest.mark.django_db
def test_a_version_that_came_into_use_since_it_was_looked_up_stays(ended, monkeypatch):
    middle = ended[1]
    seen = retention.versions_retirable()
    assert middle in seen
    slot(middle).update(desired_version=middle)
    monkeypatch.setattr(retention, "versions_retirable", lambda: seen)
    assert versions_retire() == 1  # the first version
    middle.refresh_from_db()
    assert middle.retired_at is None


@pytest.mark.django_db(transaction=True)
def test_a_hold_and_a_retirement_at_once_never_both_succeed():
    """The hold comes while the version is being looked at: it waits, and is refused, or it comes first and is seen."""
    run = make_run()
    middle = grow(run, 2)[1]
    Run.objects.filter(pk=run.pk).update(state=RunState.COMPLETED)
    holding, may_commit = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic():
            version_hold(middle)
            slot(middle).update(desired_version=middle)
            holding.set()
            may_commit.wait(10)
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(10)
    assert versions_retire() == 1  # the first version; the one in hand is passed over, not waited for
    may_commit.set()
    thread.join()
    assert versions_retire() == 0
    middle.refresh_from_db()
    assert middle.retired_at is None


@pytest.mark.django_db(transaction=True)
def test_a_hold_that_comes_during_a_retirement_waits_and_is_refused(monkeypatch):
    run = make_run()
    middle = grow(run, 2)[1]
    Run.objects.filter(pk=run.pk).update(state=RunState.COMPLETED)
    asked, refused = threading.Event(), []

    def hold():
        try:
            with transaction.atomic():
                asked.set()
                version_hold(middle)
        except Conflict as error:
            refused.append(str(error))
        connection.close()

    thread = threading.Thread(target=hold)
    read_again = retention.versions_needed

    def meanwhile(among=None):
        if among == [middle.pk]:
            thread.start()
            assert asked.wait(10)
            thread.join(0.2)  # it waits for the lock that is held here
            assert thread.is_alive()
        return read_again(among)

    monkeypatch.setattr(retention, "versions_needed", meanwhile)
    versions_retire()
    thread.join(10)
    assert len(refused) == 1
