"""Models, task sets and rubrics: immutable once published, versioned by content."""

import pytest

from controlplane.errors import Conflict, Invalid
from controlplane.models import Event, RubricVersion, Task, TaskSet
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.runs import run_create
from controlplane.states import EventType
from rl_core.types import Split
from tests.domain_factories import (
    CRITERIA,
    ROOT,
    TESTER,
    make_cluster,
    make_model,
    make_project,
    make_spec,
    make_tasks,
)

pytestmark = pytest.mark.django_db


def publish(project, criteria):
    return rubric_publish(project=project, slug="r", criteria=criteria, author=None, note="n", actor=TESTER)


def create(project, tasks, environment="word-problems"):
    return task_set_create(project=project, slug="t", environment=environment, tasks=tasks, actor=TESTER)


def test_a_model_is_registered_once_and_its_name_keeps_its_weights():
    project = make_project()
    card = make_model(project)
    assert make_model(project).pk == card.pk
    assert make_model(project, folder="/elsewhere").folder == "/elsewhere"
    with pytest.raises(Conflict, match="other weights"):
        make_model(project, root="b" * 64)
    assert make_model(make_project(), root="b" * 64).root != ROOT
    assert Event.objects.filter(project=project, type=EventType.MODEL_REGISTERED).count() == 1


def test_a_task_set_with_other_content_is_the_next_version():
    project = make_project()
    first = create(project, make_tasks(train=4, heldout=2))
    assert create(project, make_tasks(train=4, heldout=2)).pk == first.pk
    second = create(project, make_tasks(train=5, heldout=2))
    assert (first.version, second.version) == (1, 2)
    assert (second.train_count, second.heldout_count) == (5, 2)
    positions = Task.objects.filter(task_set=second, split=Split.TRAIN.value).values_list("position", flat=True)
    assert sorted(positions) == [0, 1, 2, 3, 4]


def test_a_task_set_needs_both_splits():
    project = make_project()
    with pytest.raises(Invalid, match="heldout"):
        create(project, make_tasks(train=3, heldout=0))
    assert not TaskSet.objects.filter(project=project).exists()


def test_a_rubric_is_a_chain_of_hashed_versions():
    project = make_project()
    first = publish(project, CRITERIA)
    assert publish(project, CRITERIA).pk == first.pk
    second = publish(project, [{**CRITERIA[0], "weight": 2.0}])
    assert (first.number, second.number) == (1, 2)
    assert first.content_hash != second.content_hash
    assert RubricVersion.objects.get(pk=first.pk).criteria[0]["weight"] == 1.0


@pytest.mark.parametrize(
    ("criteria", "what"),
    [
        ([], "rewards nothing"),
        ([{**CRITERIA[0], "kind": "no_such"}], "no_such"),
        ([CRITERIA[0], CRITERIA[0]], "same key"),
        ([{**CRITERIA[0], "surprise": 1}], "surprise"),
    ],
)
def test_what_is_no_rubric_is_refused_with_the_reason(criteria, what):
    with pytest.raises(Invalid, match=what) as refused:
        publish(make_project(), criteria)
    assert refused.value.field == "criteria"


def test_a_run_refuses_a_rubric_that_waits_for_users_who_never_see_its_rollouts():
    project = make_project()
    make_model(project)
    make_cluster(project)
    task_set_create(
        project=project, slug="word-problems", environment="word-problems", tasks=make_tasks(train=4), actor=TESTER
    )
    thumbs = {"key": "liked", "text": "Liked", "kind": "user_signal", "weight": 1, "params": {"signal": "thumbs"}}
    publish(project, [*CRITERIA, thumbs])
    with pytest.raises(Invalid, match=r"criterion liked .* reads a user's signal.*signal map"):
        run_create(project=project, name="r", spec=make_spec(rubric="r"), actor=TESTER)
    publish(project, CRITERIA)
    assert run_create(project=project, name="r", spec=make_spec(rubric="r"), actor=TESTER).name == "r"
