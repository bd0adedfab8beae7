"""Versions: one number, one set of weights; the head moves by compare-and-set."""

import threading

import pytest
from django.db import connection

from controlplane.errors import Conflict, StaleFence
from controlplane.models import PolicyVersion
from controlplane.services.versions import (
    PublishedWeights,
    epoch_open,
    version_begin,
    version_commit,
)
from controlplane.states import VersionState
from tests.domain_factories import TESTER, make_run

WEIGHTS = PublishedWeights(root="b" * 64, manifest_key="m", delta_bytes=1, full_bytes=9, changed_elements=1, elements=4)


def begin(run, *, fence, number=1, epoch=0):
    lineage = run.lineage
    return version_begin(lineage=lineage, epoch=epoch, number=number, parent=lineage.head, fence=fence)


def commit(run, version, *, fence):
    return version_commit(version=version, fence=fence, weights=WEIGHTS, run=run, actor=TESTER)


@pytest.mark.django_db
def test_version_zero_stands_at_once_and_is_the_head():
    run = make_run()
    first = run.lineage.head
    assert (first.epoch, first.number, first.state, first.root) == (0, 0, VersionState.COMMITTED, "a" * 64)
    assert first.snapshot_key == run.lineage.model.manifest_key
    assert first.manifest_key == run.lineage.model.manifest_key


@pytest.mark.django_db
def test_a_newer_attempt_takes_over_and_the_older_one_is_refused():
    run = make_run()
    old = begin(run, fence=1)
    new = begin(run, fence=2)
    assert old.pk == new.pk
    with pytest.raises(StaleFence):
        begin(run, fence=1)
    with pytest.raises(StaleFence):
        commit(run, old, fence=1)
    committed = commit(run, new, fence=2)
    run.lineage.refresh_from_db()
    assert (committed.state, run.lineage.head) == (VersionState.COMMITTED, committed)
    assert committed.snapshot_key == run.lineage.model.manifest_key  # from its ancestor


@pytest.mark.django_db
def test_a_commit_whose_parent_is_not_the_head_changes_nothing():
    run = make_run()
    version = begin(run, fence=1)
    commit(run, version, fence=1)
    rival = begin(run, fence=5, number=2)  # run.lineage still shows the old head
    with pytest.raises(Conflict):
        commit(run, rival, fence=5)
    assert PolicyVersion.objects.get(pk=rival.pk).state == VersionState.PUBLISHING


@pytest.mark.django_db
def test_a_committed_version_never_gets_other_weights():
    run = make_run()
    version = commit(run, begin(run, fence=1), fence=1)
    again = begin(run, fence=9)
    assert (again.pk, again.fence, again.root) == (version.pk, 1, "b" * 64)
    with pytest.raises(StaleFence):
        commit(run, again, fence=9)


@pytest.mark.django_db
def test_a_new_epoch_abandons_what_the_old_one_was_publishing():
    run = make_run()
    version = begin(run, fence=1)
    assert epoch_open(run=run, lineage=run.lineage, actor=TESTER, reason="differs") == 1
    version.refresh_from_db()
    assert version.state == VersionState.ABANDONED
    assert begin(run, fence=2, epoch=1).ref > version.ref


@pytest.mark.django_db(transaction=True)
def test_of_two_commits_at_once_one_moves_the_head():
    run = make_run()
    begin(run, fence=1)
    barrier, outcomes = threading.Barrier(2), []

    def try_commit() -> None:
        version = PolicyVersion.objects.get(lineage=run.lineage, number=1)
        barrier.wait()
        try:
            commit(run, version, fence=1)
            outcomes.append("committed")
        except Conflict:
            outcomes.append("refused")
        finally:
            connection.close()

    threads = [threading.Thread(target=try_commit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["committed", "refused"]
