"""Groups of one task that are scored at once lock its tallies in one order, so that no two wait for each other."""

import threading
import time

import pytest
from django.db import connection, transaction

from controlplane.models import PolicyVersion, Rollout, RolloutGroup, RubricVersion, Run, TaskTally
from controlplane.services.rollouts import RolloutScores, Scored, score_record
from controlplane.services.work import work_enqueue
from controlplane.states import GroupState, RolloutState, VersionState, WorkKind
from tests.domain_factories import ROOT, make_group, make_run
from tests.playing import claim_of

pytestmark = pytest.mark.django_db(transaction=True)


def versions(run: Run) -> list[PolicyVersion]:
    values = {"root": ROOT, "manifest_key": "m", "committed_at": run.created_at, "state": VersionState.COMMITTED}
    made = [PolicyVersion.objects.create(lineage=run.lineage, epoch=0, number=n, **values) for n in (1, 2)]
    return sorted(made, key=lambda one: str(one.pk))


def scoring(run: Run, order: list[PolicyVersion]) -> RolloutGroup:
    """A group whose attempts used these versions, one after another."""
    group = make_group(run, state=GroupState.SCORING)
    for attempt, version in enumerate(order):
        Rollout.objects.create(group=group, attempt=attempt, state=RolloutState.FINISHED, newest_version=version)
    with transaction.atomic():
        work_enqueue(kind=WorkKind.SCORE, ref=group.pk, project_id=run.project_id, run=run)
    return group


def score(group: RolloutGroup, run: Run) -> None:
    rubric = RubricVersion.objects.get(rubric__project=run.project)
    results = [
        RolloutScores(pk, [Scored("ran", 1.0)], 1.0)
        for pk in group.rollouts.order_by("attempt").values_list("pk", flat=True)
    ]
    try:
        assert score_record(claim_of(WorkKind.SCORE, group.pk), rubric_version=rubric, results=results)
    finally:
        connection.close()


def somebody_waits_for_us() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
        )
        return bool(cursor.fetchone()[0])


def test_a_group_holds_no_later_tally_while_it_waits_for_an_earlier_one():
    run = make_run()
    first, last = versions(run)
    group = scoring(run, [last, first])
    for version in (first, last):
        TaskTally.objects.create(task=group.task, version=version)
    scorer = threading.Thread(target=score, args=(group, run))
    with transaction.atomic():
        TaskTally.objects.select_for_update().get(task=group.task, version=first)
        scorer.start()
        until_s = time.monotonic() + 20
        while not somebody_waits_for_us():
            assert time.monotonic() < until_s
            time.sleep(0.02)
        TaskTally.objects.select_for_update(nowait=True).get(task=group.task, version=last)
    scorer.join(20)
    assert [row.attempts for row in TaskTally.objects.filter(task=group.task)] == [1, 1]
