"""Killed between any two statements, every move leaves the rows as they were, and is made whole by the next try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

from controlplane.conductor.shipping import release_advance
from controlplane.models import (
    Alert,
    AlertDelivery,
    CadenceSlot,
    CanaryStep,
    Event,
    Lane,
    PolicyVersion,
    Release,
    ReplicaSlot,
    Run,
    ServedVersion,
    WorkUnit,
)
from controlplane.selectors.canary_outcomes import CanaryRows
from controlplane.services.canaries import Look, canary_conclude
from controlplane.services.hooks import hook_create
from controlplane.services.promotions import lane_rollback, release_promote
from controlplane.services.slots import slot_run_now, slot_skip, slots_advance
from controlplane.states import Arm, ReleaseState, SlotState
from rl_core.shipping.canary import CanaryLook, Verdict
from tests.lane_rows import ACTOR
from tests.shipping_rig import (
    assert_sound,
    evaluate,
    finish_run,
    propose,
    put_in,
    shipping_world,
    slot_of,
    step_of,
    transfers_arrive,
)

pytestmark = pytest.mark.django_db

TABLES = (
    Alert,
    AlertDelivery,
    CadenceSlot,
    CanaryStep,
    Event,
    Lane,
    PolicyVersion,
    Release,
    ReplicaSlot,
    Run,
    ServedVersion,
    WorkUnit,
)


class Killed(Exception):
    """The process is gone."""


class KillAt:
    """Lets so many statements through, and kills once. The commit itself, here a savepoint's release, is not killed."""

    def __init__(self, statement: int) -> None:
        self.left = statement
        self.killed = False

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("RELEASE SAVEPOINT"):
            return execute(sql, params, many, context)
        if not self.killed and self.left == 0:
            self.killed = True
            raise Killed
        self.left -= 1
        return execute(sql, params, many, context)


def rows() -> dict[str, list[Any]]:
    return {table.__name__: sorted(map(repr, table._default_manager.values_list())) for table in TABLES}


def killed_everywhere(act: Callable[[], Any], lane: Lane, *, least: int = 3) -> int:
    """Do the act killed before its first, second, … statement; then whole. How many statements it has."""
    before, statement = rows(), 0
    while True:
        saved = transaction.savepoint()
        kill = KillAt(statement)
        try:
            with connection.execute_wrapper(kill):
                act()
        except Killed:
            assert rows() == before, f"killed before statement {statement}, something was left"
            transaction.savepoint_commit(saved)
            statement += 1
            continue
        assert not kill.killed
        break
    assert rows() != before
    assert statement >= least
    assert_sound(lane)
    return statement


def fresh(release: Release) -> Release:
    return Release.objects.select_related(
        "lane__cluster", "lane__project", "run", "version", "incumbent", "candidate_evaluation", "incumbent_evaluation"
    ).get(pk=release.pk)


@pytest.fixture
def world(settings):
    settings.ALERT_HOOK_NETWORKS = []
    made = shipping_world(approvals=0, interval_s=3600.0, shadow={"prompts": 2})
    hook_create(project=made.project, url="https://hooks.example/slipway", actor=ACTOR)
    return made


def test_a_release_on_its_way_to_the_canary(world):
    release = propose(world)
    killed_everywhere(lambda: release_advance(release=fresh(release)), world.lane)
    assert fresh(release).state == ReleaseState.GATING
    transfers_arrive(world)
    evaluate(release)
    killed_everywhere(lambda: release_advance(release=fresh(release)), world.lane)
    assert fresh(release).gate["verdict"] == "pass"
    killed_everywhere(lambda: release_advance(release=fresh(release)), world.lane)
    assert fresh(release).state == ReleaseState.SHADOW
    Release.objects.filter(pk=release.pk).update(shadow={"verdict": "pass"})
    killed_everywhere(lambda: release_advance(release=fresh(release)), world.lane)
    assert fresh(release).state == ReleaseState.CANARY


def test_a_failed_gate(world):
    release = propose(world)
    release_advance(release=fresh(release))
    transfers_arrive(world)
    evaluate(release, candidate=0.0, incumbent=0.9)
    killed_everywhere(lambda: release_advance(release=fresh(release)), world.lane)
    assert fresh(release).state == ReleaseState.FAILED


def canary(world: Any) -> Release:
    release = propose(world)
    ReplicaSlot.objects.filter(replica=world.replica, slot="candidate").update(
        desired_version=release.version, desired_source="candidate", current_version=release.version
    )
    return put_in(release, ReleaseState.CANARY)


def look(release: Release, verdict: Verdict) -> Look:
    found = CanaryLook(verdict=verdict, reasons=["so it is"], effects={}, enough_users=True, sample_ratio_p=1.0)
    return Look(step_of(release), CanaryRows({}, [], {Arm.PROMOTED: 9, Arm.CANARY: 9}), found)


def test_a_look_that_steps_on(world):
    release = canary(world)
    killed_everywhere(
        lambda: canary_conclude(release=fresh(release), look=look(release, Verdict.UNDECIDED)), world.lane
    )
    assert step_of(release).position == 1


def test_a_look_that_shows_harm(world):
    release = canary(world)
    killed_everywhere(lambda: canary_conclude(release=fresh(release), look=look(release, Verdict.FAIL)), world.lane)
    assert fresh(release).state == ReleaseState.ROLLED_BACK
    assert AlertDelivery.objects.filter(alert__lane=world.lane).count() == 1


def test_promotion_and_rollback(world):
    release = canary(world)
    release.steps.update(position=1, verdict="pass")
    first = release.incumbent
    killed_everywhere(lambda: release_promote(release=fresh(release), actor=ACTOR, reason="go"), world.lane)
    killed_everywhere(
        lambda: lane_rollback(lane=Lane.objects.get(pk=world.lane.pk), version=first, actor=ACTOR, reason="bad"),
        world.lane,
    )
    assert Lane.objects.get(pk=world.lane.pk).promoted_version == first


def test_a_slot_from_its_opening_to_its_end(world):
    step = lambda: slots_advance(lane=world.lane)  # noqa: E731
    killed_everywhere(step, world.lane)  # plans the first
    Lane.objects.filter(pk=world.lane.pk).update(next_slot_at="2026-01-01T00:00:00Z")
    killed_everywhere(step, world.lane)
    killed_everywhere(step, world.lane)
    slot = slot_of(world)
    assert slot.state == SlotState.TRAINING
    finish_run(slot.run)
    killed_everywhere(step, world.lane)
    slot = slot_of(world)
    assert slot.state == SlotState.RELEASING
    put_in(slot.release, ReleaseState.CANARY)
    CadenceSlot.objects.filter(pk=slot.pk).update(deadline_at="2026-01-01T00:00:00Z")
    killed_everywhere(step, world.lane)
    slot = slot_of(world)
    assert (slot.state, slot.release.state) == (SlotState.SKIPPED, ReleaseState.SKIPPED)


def test_a_slot_run_now_and_skipped_while_it_trains(world):
    killed_everywhere(lambda: slot_run_now(lane=world.lane, actor=ACTOR, reason="now"), world.lane)
    slots_advance(lane=world.lane)
    killed_everywhere(lambda: slot_skip(lane=world.lane, actor=ACTOR, reason="no"), world.lane)
    assert slot_of(world).run.state == "stopped"
