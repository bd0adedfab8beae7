"""What was graded stays as it is when a neighbour's grader failed: it is neither scored again nor counted again."""

import pytest

from controlplane.models import CriterionScore, Rollout, RubricVersion, TaskTally
from controlplane.services.rollouts import RolloutScores, Scored, score_begin, score_record
from controlplane.services.work import work_enqueue
from controlplane.states import GroupState, RolloutState, WorkKind
from tests.domain_factories import make_group, make_run
from tests.simulated_workers import claim_of

pytestmark = pytest.mark.django_db


def graded(rollout: Rollout, value: float | None) -> RolloutScores:
    error = "" if value is not None else "the judge did not answer"
    return RolloutScores(rollout.pk, [Scored("ran", value, "", error)], value)


def test_a_later_try_grades_only_what_has_no_reward():
    run = make_run()
    group = make_group(run, state=GroupState.SCORING)
    first, second = (
        Rollout.objects.create(
            group=group, attempt=attempt, state=RolloutState.FINISHED, newest_version=run.lineage.head
        )
        for attempt in range(2)
    )
    rubric = RubricVersion.objects.get(rubric__project=run.project)
    claim = claim_of(work_enqueue(kind=WorkKind.SCORE, ref=group.pk, project_id=run.project_id, run=run))
    assert score_begin(claim) is not None
    assert not score_record(claim, rubric_version=rubric, results=[graded(first, 0.25), graded(second, None)])
    assert score_record(claim, rubric_version=rubric, results=[graded(first, 1.0), graded(second, 0.75)])
    rewards = list(group.rollouts.order_by("attempt").values_list("reward", flat=True))
    assert rewards == [0.25, 0.75]
    assert CriterionScore.objects.get(rollout=first).value == 0.25
    group.refresh_from_db()
    assert (group.state, group.mean_reward) == (GroupState.READY, 0.5)
    assert TaskTally.objects.get(task=group.task).attempts == 2
