"""Evaluations outside a run: what failed can be asked again, and goes on when its dead letters are replayed."""

import pytest
from django.db.models.functions import Now

from controlplane.conductor.duties import advance_evaluations
from controlplane.models import Evaluation, RolloutGroup, RubricVersion, TaskSet, WorkUnit
from controlplane.services.evaluations import evaluation_advance, evaluation_request, evaluations_open
from controlplane.services.runs import run_stop
from controlplane.services.versions import lineage_create
from controlplane.services.work import work_replay
from controlplane.states import EvaluationState, GroupState, WorkState
from tests.domain_factories import TESTER, make_catalog, make_project, make_run

pytestmark = pytest.mark.django_db


def state_of(evaluation: Evaluation) -> str:
    evaluation.refresh_from_db()
    return evaluation.state


def question() -> dict:
    project = make_project()
    model, task_set, rubric_version = make_catalog(project)
    version = lineage_create(project=project, model=model, parent=None).head
    return {
        "project": project,
        "version": version,
        "task_set": task_set,
        "rubric_version": rubric_version,
        "task_count": 2,
    }


def failed(asked: dict) -> Evaluation:
    evaluation = evaluation_request(**asked)
    advance_evaluations()
    WorkUnit.objects.update(state=WorkState.DEAD, error="no sandbox", finished_at=Now())
    advance_evaluations()
    assert state_of(evaluation) == EvaluationState.FAILED
    return evaluation


def test_replayed_dead_letters_revive_an_evaluation_that_no_run_looks_after():
    evaluation = failed(question())
    assert evaluations_open() == []
    first, second = WorkUnit.objects.order_by("created_at")
    work_replay(unit=first, actor=TESTER, reason="mended")
    assert evaluations_open() == []  # the other is still dead
    work_replay(unit=second, actor=TESTER, reason="mended")
    advance_evaluations()
    assert state_of(evaluation) == EvaluationState.RUNNING
    RolloutGroup.objects.update(state=GroupState.READY, mean_reward=0.5)
    advance_evaluations()
    assert state_of(evaluation) == EvaluationState.DONE


def test_asked_again_while_its_letters_are_dead_it_is_the_same_failed_one():
    asked = question()
    evaluation = failed(asked)
    assert evaluation_request(**asked) == evaluation
    assert state_of(evaluation) == EvaluationState.FAILED


def test_asked_again_after_its_run_was_stopped_it_begins_anew():
    run = make_run()
    asked = {
        "project": run.project,
        "version": run.lineage.head,
        "task_set": TaskSet.objects.get(project=run.project),
        "rubric_version": RubricVersion.objects.get(rubric__project=run.project),
        "task_count": 2,
    }
    evaluation = evaluation_request(**asked, run=run, step_number=0)
    evaluation_advance(evaluation.pk)
    WorkUnit.objects.filter(ref=evaluation.groups.first().pk).update(state=WorkState.DEAD)
    run_stop(run=run, actor=TESTER, reason="enough")
    assert state_of(evaluation) == EvaluationState.FAILED
    assert evaluations_open() == []

    assert evaluation_request(**asked) == evaluation
    advance_evaluations()
    assert state_of(evaluation) == EvaluationState.RUNNING
    assert set(evaluation.groups.values_list("state", flat=True)) == {GroupState.ADMITTED}
    units = WorkUnit.objects.filter(ref__in=evaluation.groups.values("pk"))
    assert [unit.state for unit in units] == [WorkState.QUEUED] * 2
    assert not WorkUnit.objects.filter(state=WorkState.DEAD).exists()
