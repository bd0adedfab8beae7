"""Environments as a project knows them: those that ship, and its own remote ones."""

import json

import pytest

from controlplane.errors import Invalid
from controlplane.models import RolloutGroup
from controlplane.selectors.environments import environment_of, environments_of, remote_named
from controlplane.selectors.rollout_plans import rollout_plan
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.runs import run_create
from controlplane.services.task_sets import TaskFile, task_set_upload
from controlplane.states import GroupPurpose
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.remote.messages import Described, ToolDescription
from rl_core.environments.remote.protocol import Kind
from tests.domain_factories import CRITERIA, TESTER, make_project, make_run, make_spec, make_tasks
from tests.remote_rows import SECRET, make_remote

pytestmark = pytest.mark.django_db

TOOL = ToolDescription(name="add", parameters={"type": "object"})


def test_a_project_sees_its_own_remotes_beside_what_ships():
    project, other = make_project(), make_project()
    make_remote(project)
    assert [one.slug for one in environments_of(project.pk)] == sorted([*ENVIRONMENTS, "shop"])
    assert [one.slug for one in environments_of(other.pk)] == sorted(ENVIRONMENTS)
    assert environment_of(other.pk, "shop") is None
    assert environment_of(project.pk, "shop").max_turns == 5
    assert remote_named(project.pk, "word-problems") is None


def test_a_name_that_ships_or_was_another_kind_is_refused():
    project = make_project()
    with pytest.raises(Invalid, match="ships"):
        make_remote(project, slug="word-problems")
    make_remote(project)
    with pytest.raises(Invalid, match="was a remote environment, and is a world now"):
        make_remote(project, described=Described(kind=Kind.WORLD, tools=[TOOL]))


def test_tasks_of_an_environment_are_its_own_matter_and_those_of_a_world_need_a_prompt():
    project = make_project()
    make_remote(project)
    make_remote(project, slug="count", described=Described(kind=Kind.WORLD, tools=[TOOL]))
    tasks = [{"id": f"t{n}", "split": split, "input": {"index": n}} for n, split in enumerate(("train", "heldout"))]

    def upload(environment, rows):
        lines = "\n".join(json.dumps(row) for row in rows).encode()
        return task_set_upload(
            project=project, slug="s", environment=environment, content=lines, kind=TaskFile.JSONL, actor=TESTER
        )

    assert upload("shop", tasks).environment == "shop"
    with pytest.raises(Invalid, match="needs a prompt"):
        upload("count", tasks)
    prompted = [{**task, "input": {"prompt": f"count {task['id']}"}} for task in tasks]
    assert upload("count", prompted).environment == "count"


def test_runs_take_remote_environments_of_their_own_project_alone():
    project, other = make_project(), make_project()
    make_run(project)
    make_run(other)
    make_remote(project)
    spec = make_spec(environment="shop", task_set="shop", rubric="shop")
    for one in (project, other):
        task_set_create(project=one, slug="shop", environment="shop", tasks=make_tasks(), actor=TESTER)
        rubric_publish(project=one, slug="shop", criteria=CRITERIA, author=None, note="", actor=TESTER)
    run = run_create(project=project, name="r", spec=spec, actor=TESTER)
    with pytest.raises(Invalid, match="no environment 'shop'"):
        run_create(project=other, name="r", spec=spec, actor=TESTER)
    task = run.project.task_sets.get(slug="shop").tasks.first()
    group = RolloutGroup.objects.create(
        run=run,
        stage=run.stages.get(),
        task=task,
        purpose=GroupPurpose.TRAIN,
        position=0,
        draw=0,
        size=1,
        seed=1,
        admitted_version=run.lineage.head,
    )
    plan = rollout_plan(group)
    assert (plan.remote.slug, plan.remote.place.secret) == ("shop", SECRET)
    assert SECRET not in repr(plan)
