"""The loop end to end with every part real, on a tiny random model."""

import pytest

from controlplane.models import Attempt, BatchItem, PolicyVersion, ReplicaSlot, Transfer
from controlplane.services.runs import run_create
from controlplane.states import RunState, StepState, TransferState
from tests.domain_factories import TESTER, make_spec
from tests.loop_rig import running_rig

SPEC = {
    "steps": 3,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_staleness": 1,
    "eval_tasks": 3,
    "checkpoint_every": 2,
    "sampling": {"max_tokens": 8},
    "optimizer": {"learning_rate": 1e-2},
}


@pytest.mark.full
@pytest.mark.django_db(transaction=True)
def test_a_run_trains_publishes_and_evaluates(tmp_path, settings):
    with running_rig(tmp_path, settings) as rig:
        run = run_create(project=rig.project, name="tiny", spec=make_spec(**SPEC), actor=TESTER)
        rig.run_to_end(run)
        assert run.state == RunState.COMPLETED
        steps = list(run.steps.order_by("number"))
        assert [(step.number, step.state) for step in steps] == [(n, StepState.PUBLISHED) for n in (1, 2, 3)]
        assert BatchItem.objects.filter(step__run=run).count() == 3 * 2 * 4
        head = run.lineage.versions.order_by("-number").first()
        slots = ReplicaSlot.objects.filter(replica__cluster__project=rig.project)
        assert {slot.current_version_id for slot in slots} == {head.pk}
        assert {slot.current_root for slot in slots} == {head.root}
        assert [e.step_number for e in run.evaluations.order_by("step_number")] == [0, 3]
        deltas = Transfer.objects.filter(version__number__gt=0, state=TransferState.DONE)
        assert deltas.exists()
        assert all(0 < delta.fetched_bytes < delta.full_bytes for delta in deltas)
        roots = PolicyVersion.objects.filter(lineage=run.lineage).values_list("root", flat=True)
        assert len(set(roots)) == 4
        assert not Attempt.objects.exclude(error="").exists(), list(Attempt.objects.exclude(error="").values())
