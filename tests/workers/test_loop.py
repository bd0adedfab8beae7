"""The loop end to end with every part real, on a tiny random model."""

import time

import pytest

from controlplane.models import Attempt, BatchItem, PolicyVersion, Publication, ReplicaSlot, Transfer
from controlplane.services.runs import run_create
from controlplane.states import PublicationKind, RunState, StepState, TransferState
from rl_core.delta import read_manifest
from rl_core.store import open_store
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


def note_what_came_ahead(run, settings, ahead):
    """Versions whose segments both replicas had before anything was told to hold them."""
    run.lineage.refresh_from_db()
    head = run.lineage.head
    if head.number and head.number not in ahead and not Transfer.objects.filter(version=head).exists():
        wanted = {
            segment.blake3 for segment in read_manifest(open_store(settings.STORE_URL), head.manifest_key).segments
        }
        spools = [settings.STATE_DIR / "spool" / name for name in ("east", "west")]
        wait_until(lambda: all(wanted <= {path.name for path in spool.iterdir()} for spool in spools))
        ahead.add(head.number)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.django_db(transaction=True)
def test_a_run_trains_publishes_and_evaluates(tmp_path, settings):
    with running_rig(tmp_path, settings) as rig:
        run = run_create(project=rig.project, name="tiny", spec=make_spec(**SPEC), actor=TESTER)
        ahead: set[int] = set()
        rig.run_to_end(run, each=lambda run: note_what_came_ahead(run, settings, ahead))
        assert ahead == {1, 2, 3}
        published = Publication.objects.filter(version__lineage=run.lineage, kind=PublicationKind.DELTA)
        first, *others = published.order_by("version__number")
        assert (first.profile, first.profile_reason) == ("small", "no link has been measured yet")
        assert all("MB/s to" in one.profile_reason and one.encode_s for one in others)
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
