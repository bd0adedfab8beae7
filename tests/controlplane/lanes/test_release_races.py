"""Two at once on a real PostgreSQL: one wins, the other is refused, and the lane is sound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import pytest
from django.db import connection

from controlplane.errors import Conflict, ControlPlaneError, StaleRevision
from controlplane.models import CadenceSlot, Lane, Release, ReplicaSlot
from controlplane.selectors.canary_outcomes import CanaryRows
from controlplane.services.cadence import cadence_pause, cadence_update
from controlplane.services.canaries import Look, canary_conclude, release_step_on
from controlplane.services.promotions import lane_rollback, release_promote, release_rollback
from controlplane.services.releases import release_end, release_pause, release_propose
from controlplane.services.slots import slot_run_now, slot_skip, slots_advance
from controlplane.states import Arm, ReleaseState
from rl_core.shipping.canary import CanaryLook, Verdict
from tests.lane_rows import ACTOR, candidate_version
from tests.shipping_rig import assert_sound, cadence_spec, propose, put_in, shipping_world, step_of

pytestmark = pytest.mark.django_db(transaction=True)


def at_once(*acts: Callable[[], Any]) -> list[BaseException | None]:
    """Do all at the same moment, each on a connection of its own; what each raised."""
    barrier = threading.Barrier(len(acts))
    raised: list[BaseException | None] = [None] * len(acts)

    def do(number: int, act: Callable[[], Any]) -> None:
        try:
            barrier.wait(timeout=30)
            act()
        except BaseException as error:  # noqa: BLE001
            raised[number] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=do, args=(number, act)) for number, act in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return raised


def ready_canary(**world: Any) -> Release:
    """A canary whose last step has passed: everything can be done to it."""
    made = shipping_world(approvals=0, **world)
    release = propose(made)
    ReplicaSlot.objects.filter(replica=made.replica, slot="candidate").update(
        desired_version=release.version, desired_source="candidate", current_version=release.version
    )
    row = put_in(release, ReleaseState.CANARY)
    row.steps.update(position=1, verdict="pass")
    return row


def failing_look(release: Release) -> Look:
    found = CanaryLook(verdict=Verdict.FAIL, reasons=["worse"], effects={}, enough_users=True, sample_ratio_p=1.0)
    return Look(step_of(release), CanaryRows({}, [], {Arm.PROMOTED: 9, Arm.CANARY: 9}), found)


ACTS: dict[str, Callable[[Release], Any]] = {
    "promote": lambda row: release_promote(release=row, actor=ACTOR, reason="go", expected_revision=row.revision),
    "abort": lambda row: release_end(release=row, actor=ACTOR, reason="no", expected_revision=row.revision),
    "pause": lambda row: release_pause(release=row, actor=ACTOR, reason="wait", expected_revision=row.revision),
    "rollback": lambda row: release_rollback(release=row, actor=ACTOR, reason="bad", expected_revision=row.revision),
    "harm": lambda row: canary_conclude(release=row, look=failing_look(row)),
}


@pytest.mark.parametrize(("one", "other"), list(combinations_with_replacement(ACTS, 2)))
def test_of_two_acts_on_what_both_saw_one_wins(one, other):
    row = ready_canary()
    raised = at_once(*(lambda act=ACTS[name]: act(Release.objects.get(pk=row.pk)) for name in (one, other)))
    losers = [error for error in raised if error is not None]
    assert [type(error) for error in losers] == [StaleRevision], raised
    after = Release.objects.get(pk=row.pk)
    assert after.state != ReleaseState.CANARY
    assert after.revision == row.revision + 1
    assert_sound(row.lane)


def test_without_a_revision_the_second_is_refused_by_the_state():
    row = ready_canary()
    acts = [
        lambda: release_end(release=Release.objects.get(pk=row.pk), actor=ACTOR, reason="no"),
        lambda: release_rollback(release=Release.objects.get(pk=row.pk), actor=ACTOR, reason="bad"),
    ]
    losers = [error for error in at_once(*acts) if error is not None]
    assert len(losers) == 1
    assert isinstance(losers[0], Conflict)
    assert_sound(row.lane)


def test_two_steps_on_at_once_are_one_step():
    row = ready_canary(canary={"steps": [0.1, 0.2, 0.5], "metrics": cadence_spec()["canary"]["metrics"]})
    row.steps.update(position=0, verdict="")
    step_on = lambda: release_step_on(  # noqa: E731
        release=row, actor=ACTOR, reason="go on", expected_revision=row.revision
    )
    losers = [error for error in at_once(step_on, step_on) if error is not None]
    assert [type(error) for error in losers] == [StaleRevision]
    assert list(row.steps.order_by("position").values_list("position", flat=True)) == [0, 1]
    assert_sound(row.lane)


def test_two_proposals_at_once_are_one_release():
    world = shipping_world()
    versions = [candidate_version(world, root=letter * 64) for letter in "de"]
    raised = at_once(
        *(
            lambda version=version: release_propose(
                lane=world.lane, version=version, run=None, proposer=None, actor=ACTOR, reason="better"
            )
            for version in versions
        )
    )
    assert sorted(type(error).__name__ for error in raised) == ["Conflict", "NoneType"]
    assert_sound(world.lane)


def test_two_conductors_open_one_slot_and_train_it_once():
    world = shipping_world(interval_s=3600.0)
    slots_advance(lane=world.lane)
    Lane.objects.filter(pk=world.lane.pk).update(next_slot_at="2026-01-01T00:00:00Z")
    for _ in range(3):
        raised = at_once(*([lambda: slots_advance(lane=world.lane)] * 3))
        assert raised == [None] * 3
    slot = CadenceSlot.objects.get(lane=world.lane)
    assert slot.state == "training"
    assert world.project.runs.count() == 1
    assert_sound(world.lane)


def test_a_slot_run_now_twice_at_once_is_opened_once():
    world = shipping_world()
    run_now = lambda: slot_run_now(lane=world.lane, actor=ACTOR, reason="now")  # noqa: E731
    raised = at_once(run_now, run_now)
    assert sorted(type(error).__name__ for error in raised) == ["Conflict", "NoneType"]
    assert CadenceSlot.objects.filter(lane=world.lane).count() == 1


def test_a_skip_and_the_conductor_at_once_end_defined():
    world = shipping_world()
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    raised = at_once(
        lambda: slots_advance(lane=world.lane), lambda: slot_skip(lane=world.lane, actor=ACTOR, reason="not today")
    )
    assert all(error is None or isinstance(error, ControlPlaneError) for error in raised), raised
    slot = CadenceSlot.objects.get(lane=world.lane)
    assert slot.state == "skipped"
    assert all(run.state == "stopped" for run in world.project.runs.all())
    assert_sound(world.lane)


def test_two_changes_of_a_cadence_seen_the_same_are_one():
    world = shipping_world()
    lane = Lane.objects.get(pk=world.lane.pk)
    acts = [
        lambda: cadence_update(
            lane=lane, cadence=cadence_spec(interval_s=60.0), actor=ACTOR, reason="a", expected_revision=lane.revision
        ),
        lambda: cadence_pause(lane=lane, actor=ACTOR, reason="b", expected_revision=lane.revision),
    ]
    losers = [error for error in at_once(*acts) if error is not None]
    assert [type(error) for error in losers] == [StaleRevision]
    assert Lane.objects.get(pk=lane.pk).revision == lane.revision + 1


def test_a_rollback_of_the_lane_and_a_promotion_at_once_leave_one_version_serving():
    row = ready_canary()
    first = row.lane.promoted_version
    release_promote(release=row, actor=ACTOR, reason="go")
    world_lane = Lane.objects.get(pk=row.lane_id)
    set_cadence_of = cadence_spec(canary={"steps": []})
    cadence_update(lane=world_lane, cadence=set_cadence_of, actor=ACTOR, reason="no canary")
    second = release_propose(
        lane=world_lane, version=_child(row.version), run=None, proposer=None, actor=ACTOR, reason="next"
    )
    Release.objects.filter(pk=second.pk).update(state="gating", gate={"verdict": "pass"})
    ReplicaSlot.objects.filter(replica__cluster=world_lane.cluster_id, slot="default").update(
        desired_version=second.version, desired_source="candidate", current_version=first
    )
    raised = at_once(
        lambda: release_promote(release=Release.objects.get(pk=second.pk), actor=ACTOR, reason="go"),
        lambda: lane_rollback(lane=world_lane, version=first, actor=ACTOR, reason="bad"),
    )
    assert all(error is None or isinstance(error, Conflict) for error in raised), raised
    lane = Lane.objects.get(pk=row.lane_id)
    assert lane.promoted_version_id in (first.pk, second.version_id)
    assert_sound(lane)


def _child(version: Any) -> Any:
    from controlplane.models import PolicyVersion

    return PolicyVersion.objects.create(
        lineage=version.lineage,
        epoch=0,
        number=2,
        state="committed",
        parent=version,
        root="f" * 64,
        manifest_key="m.json",
        committed_at=version.committed_at,
    )
