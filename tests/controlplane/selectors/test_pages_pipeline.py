"""The strip from collected feedback to a promoted version, at every place where a turn can stand or end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.conductor.shipping import advance_lanes
from controlplane.models import CadenceSlot, CanaryStep, Lane, Release
from controlplane.selectors.pages_lanes import lane_releases
from controlplane.selectors.pages_pipeline import Pipeline, pipeline_of
from controlplane.services.cadence import cadence_of
from controlplane.services.releases import release_pause
from controlplane.states import CanaryVerdict, ReleaseState, SlotState
from rl_core.shipping.specs import CadenceSpec
from tests.lane_rows import ACTOR, LaneWorld
from tests.shipping_rig import evaluate, make_run, propose, shipping_world, to_canary, transfers_arrive

pytestmark = pytest.mark.django_db


def strip(world: LaneWorld) -> Pipeline:
    lane = Lane.objects.get(pk=world.lane.pk)
    slots = list(lane.cadence_slots.select_related("run", "release").order_by("-number"))
    return pipeline_of(lane, cadence_of(lane) or CadenceSpec(), slots, lane_releases(lane))


def marks(world: LaneWorld) -> str:
    """`collect+ train. gate` and so on: + done, * now, = paused, ! stopped, nothing ahead."""
    signs = {"done": "+", "now": "*", "paused": "=", "stopped": "!", "ahead": ""}
    return " ".join(stage.label.lower().replace(" ", "") + signs[stage.mark.value] for stage in strip(world).stages)


def open_slot(world: LaneWorld, state: SlotState, **values: Any) -> CadenceSlot:
    now = timezone.now()
    slots = CadenceSlot.objects.filter(lane=world.lane)
    return CadenceSlot.objects.create(
        lane=world.lane,
        number=slots.count() + 1,
        state=state,
        due_at=now,
        deadline_at=now + timedelta(hours=1),
        **values,
    )


def test_nothing_happened_yet() -> None:
    world = shipping_world()
    assert marks(world) == "collect train gate canary20% canary50% promoted"
    assert not strip(world).under_way


def test_a_slot_collects_and_trains() -> None:
    world = shipping_world()
    slot = open_slot(world, SlotState.OPEN, reason="waits for signals: 3 of 40 have matured")
    assert marks(world) == "collect* train gate canary20% canary50% promoted"
    assert strip(world).stages[0].detail == "waits for signals: 3 of 40 have matured"
    CadenceSlot.objects.filter(pk=slot.pk).update(state=SlotState.TRAINING, run=make_run(world), reason="running")
    assert marks(world) == "collect+ train* gate canary20% canary50% promoted"
    assert strip(world).under_way
    CadenceSlot.objects.filter(pk=slot.pk).update(state=SlotState.SKIPPED)
    assert marks(world) == "collect+ train! gate canary20% canary50% promoted"
    assert not strip(world).under_way


def test_a_release_goes_through_gate_and_canary() -> None:
    world = shipping_world()
    release = propose(world)
    assert marks(world) == "collect+ train+ gate* canary20% canary50% promoted"
    advance_lanes()
    transfers_arrive(world)
    evaluate(release)
    advance_lanes()
    advance_lanes()
    assert marks(world) == "collect+ train+ gate+ canary20%* canary50% promoted"
    release.refresh_from_db()
    release_pause(release=release, actor=ACTOR, reason="wait")
    assert marks(world) == "collect+ train+ gate+ canary20%= canary50% promoted"
    Release.objects.filter(pk=release.pk).update(state=ReleaseState.SKIPPED, paused_from="")
    assert marks(world) == "collect+ train+ gate+ canary20%! canary50% promoted"


def test_a_passed_canary_waits_for_people() -> None:
    world = shipping_world()
    release = to_canary(world)
    CanaryStep.objects.create(release=release, position=1, share=0.5, verdict=CanaryVerdict.PASS)
    assert marks(world) == "collect+ train+ gate+ canary20%+ canary50%+ promoted*"
    assert strip(world).stages[-1].detail == "waits for people"
    assert strip(world).stages[-2].detail == "pass"


def test_a_promotion_and_its_way_back() -> None:
    world = shipping_world()
    release = to_canary(world)
    Release.objects.filter(pk=release.pk).update(state=ReleaseState.PROMOTED, promoted_at=timezone.now())
    assert marks(world) == "collect+ train+ gate+ canary20%+ canary50%+ promoted+"
    Release.objects.filter(pk=release.pk).update(state=ReleaseState.ROLLED_BACK)
    assert marks(world) == "collect+ train+ gate+ canary20%+ canary50%+ promoted!"
    assert strip(world).stages[-1].detail == "rolled back"


def test_a_gate_that_fails_stops_there() -> None:
    world = shipping_world()
    release = propose(world)
    advance_lanes()
    transfers_arrive(world)
    evaluate(release, candidate=0.1, incumbent=0.9)
    advance_lanes()
    assert marks(world) == "collect+ train+ gate! canary20% canary50% promoted"
    assert strip(world).stages[2].detail == "fail"


def test_a_shadow_has_a_stage_of_its_own() -> None:
    world = shipping_world(shadow={"prompts": 5})
    release = propose(world)
    Release.objects.filter(pk=release.pk).update(state=ReleaseState.SHADOW, gate={"verdict": "pass"})
    assert marks(world) == "collect+ train+ gate+ shadow* canary20% canary50% promoted"
    Release.objects.filter(pk=release.pk).update(shadow={"verdict": "fail"}, state=ReleaseState.FAILED)
    assert marks(world) == "collect+ train+ gate+ shadow! canary20% canary50% promoted"


def test_what_is_newest_is_shown() -> None:
    world = shipping_world()
    release = to_canary(world)
    Release.objects.filter(pk=release.pk).update(state=ReleaseState.PROMOTED, promoted_at=timezone.now())
    open_slot(world, SlotState.OPEN)
    assert marks(world).startswith("collect* train gate")
