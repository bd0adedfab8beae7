"""A draw whose group was lost comes back under the same seed, before any other, and is let go in the end."""

import pytest

from controlplane.conductor import run_advance
from controlplane.models import RolloutGroup, Run, WorkUnit
from controlplane.selectors.lost_groups import lost_groups
from controlplane.services.groups import TRIES_OF_A_DRAW
from controlplane.services.work import work_fail
from controlplane.states import GroupPurpose, GroupState, RunState, WorkKind
from rl_core.errors import SandboxRefused
from tests.domain_factories import make_group, make_run, make_spec
from tests.simulated_workers import claim_of, roll_out, score, train, transfer

pytestmark = pytest.mark.django_db


def started(**stage) -> Run:
    run = make_run(**({"prompts_per_step": 2, "max_staleness": 0} | stage))
    run_advance(run.pk)
    return run


def of_draw(run: Run, draw: int) -> list[RolloutGroup]:
    return list(run.groups.filter(purpose=GroupPurpose.TRAIN, draw=draw).order_by("position"))


def lose(run: Run, draw: int) -> RolloutGroup:
    group = of_draw(run, draw)[-1]
    work_fail(claim_of(WorkUnit.objects.get(ref=group.pk, kind=WorkKind.ROLLOUT)), SandboxRefused("no namespaces"))
    run_advance(run.pk)
    group.refresh_from_db()
    assert group.state == GroupState.VOIDED
    return group


def test_a_lost_draw_comes_back_as_the_same_group_and_is_let_go_after_its_tries():
    run = started()
    first = of_draw(run, 0)[0]
    for tries in range(1, TRIES_OF_A_DRAW):
        lose(run, 0)
        (*_, again) = of_draw(run, 0)
        assert (again.task_id, again.seed, again.state) == (first.task_id, first.seed, GroupState.ADMITTED)
        assert len(of_draw(run, 0)) == tries + 1
        assert {row.fate for row in lost_groups(run)} == {"admitted again"}
    assert of_draw(run, 2) == []
    lose(run, 0)
    assert len(of_draw(run, 0)) == TRIES_OF_A_DRAW
    assert len(of_draw(run, 2)) == 1, "the next draw takes its place"
    assert {row.fate for row in lost_groups(run)} == {"let go after 3 groups"}
    run.refresh_from_db()
    assert run.state == RunState.RUNNING


def test_a_batch_is_in_the_order_of_draws_whoever_came_last():
    run = started()
    lose(run, 0)
    for kind, do in ((WorkKind.TRANSFER, transfer), (WorkKind.ROLLOUT, roll_out), (WorkKind.SCORE, score)):
        for unit in WorkUnit.objects.filter(project=run.project, kind=kind, state="queued").order_by("created_at"):
            do(claim_of(unit))
    run_advance(run.pk)
    step = run.steps.get()
    draws = list(step.batch.order_by("position").values_list("rollout__group__draw", flat=True))
    assert draws == [0, 0, 1, 1]
    train(claim_of(WorkUnit.objects.get(kind=WorkKind.TRAIN)))


def test_two_bad_tasks_do_not_fail_a_run():
    run = started()
    for _ in range(TRIES_OF_A_DRAW):
        for draw in (0, 1):
            lose(run, draw)
    run.refresh_from_db()
    assert run.state == RunState.RUNNING, run.state_reason
    assert len(of_draw(run, 2)) == len(of_draw(run, 3)) == 1
    lose(run, 2)
    run.refresh_from_db()
    assert run.state == RunState.FAILED, "a third one in a row is no longer the tasks' own fault"


def test_equal_draws_of_two_stages_are_two_draws():
    spec = make_spec()
    run = make_run(spec={**spec, "stages": [*spec["stages"], *spec["stages"]]})
    make_group(run, state=GroupState.VOIDED, draw=0)
    make_group(run, stage=run.stages.get(position=1), state=GroupState.CONSUMED, draw=0)
    (row,) = lost_groups(run)
    assert (row.tries, row.fate) == (1, "comes back")
