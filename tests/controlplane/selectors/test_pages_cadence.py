"""Where a lane's cadence stands, in one word and why; how its slots went; what its next window holds."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models import F
from django.utils import timezone

from controlplane.conductor.shipping import advance_lanes
from controlplane.models import CadenceSlot, Lane, Release
from controlplane.selectors.pages_cadence import LaneMood, cadence_view, readiness_of, slot_history
from controlplane.services.cadence import cadence_pause, cadence_update
from controlplane.states import ReleaseState, SlotState
from tests.lane_rows import ACTOR, LaneWorld
from tests.lane_story import Story, empty_lane
from tests.shipping_rig import cadence_spec, shipping_world, to_canary

pytestmark = pytest.mark.django_db


def lane_of(world: LaneWorld) -> Lane:
    return Lane.objects.select_related("promoted_version", "project", "cluster").get(pk=world.lane.pk)


def test_the_mood_is_the_one_that_keeps_it_still() -> None:
    world = shipping_world(interval_s=600.0)
    assert cadence_view(lane_of(world)).mood is LaneMood.RUNNING
    today = timezone.now().date()
    frozen = cadence_spec(interval_s=600.0, freezes=[{"kind": "date", "date": today.isoformat()}])
    cadence_update(lane=lane_of(world), cadence=frozen, actor=ACTOR, reason="test")
    view = cadence_view(lane_of(world))
    assert (view.mood, view.freezes) == (LaneMood.FROZEN, [f"date {today.isoformat()}"])
    assert view.why.startswith("until ")
    cadence_pause(lane=lane_of(world), actor=ACTOR, reason="test")
    assert cadence_view(lane_of(world)).mood is LaneMood.PAUSED
    Lane.objects.filter(pk=world.lane.pk).update(hold_reason="behaviour alert on refusal")
    view = cadence_view(lane_of(world))
    assert view.mood is LaneMood.HELD
    assert "behaviour alert on refusal" in view.why
    Lane.objects.filter(pk=world.lane.pk).update(rollback_to=lane_of(world).promoted_version)
    assert cadence_view(lane_of(world)).mood is LaneMood.ROLLING_BACK


def test_a_cadence_without_an_interval_is_by_hand() -> None:
    assert cadence_view(lane_of(shipping_world())).mood is LaneMood.BY_HAND
    view = cadence_view(empty_lane().lane)
    assert (view.mood, view.configured, view.spec.canary.steps) == (LaneMood.BY_HAND, False, ())


def test_the_next_slot_is_told_only_while_it_comes() -> None:
    world = shipping_world(interval_s=600.0)
    advance_lanes()
    lane = lane_of(world)
    assert lane.next_slot_at is not None
    assert cadence_view(lane).next_at == lane.next_slot_at
    cadence_pause(lane=lane, actor=ACTOR, reason="test")
    assert cadence_view(lane_of(world)).next_at is None


def slot(world: LaneWorld, number: int, state: SlotState, reason: str = "") -> None:
    now = timezone.now()
    CadenceSlot.objects.create(lane=world.lane, number=number, state=state, due_at=now, deadline_at=now, reason=reason)


def test_rates_count_what_ended() -> None:
    world = shipping_world()
    assert slot_history(lane_of(world)).record.skip_rate is None
    slot(world, 1, SlotState.SKIPPED, "frozen until 2026-12-27")
    slot(world, 2, SlotState.SKIPPED, "undecided at its deadline: waits for signals")
    slot(world, 3, SlotState.SKIPPED, "undecided at its deadline: the run is running")
    slot(world, 4, SlotState.DONE)
    slot(world, 5, SlotState.OPEN)
    history = slot_history(lane_of(world))
    assert [row.number for row in history.slots] == [5, 4, 3, 2, 1]
    assert history.record.skip_rate == 0.75
    assert history.record.reasons[0] == ("undecided at its deadline", 2)


def test_the_time_to_detect_runs_from_the_first_user_to_the_end() -> None:
    world = shipping_world()
    release = to_canary(world)
    step = release.steps.get(position=0)
    Release.objects.filter(pk=release.pk).update(
        state=ReleaseState.ROLLED_BACK, finished_at=step.created_at + timedelta(minutes=7)
    )
    record = slot_history(lane_of(world)).record
    assert record.detection_s == pytest.approx(420, abs=1)
    assert record.rollback_rate == 1.0


def test_readiness_counts_by_sender_and_by_age_of_the_version() -> None:
    story: Story = empty_lane(cadence=True)
    story.answer(20, seed=4)
    story.lane.served.update(created_at=F("created_at") - timedelta(hours=1))  # a transaction has one now()
    story.lane.generations.update(created_at=F("created_at") - timedelta(minutes=1))
    ready = readiness_of(story.lane)
    said = story.world.project.feedback.count()
    assert ready.mix == [("product", said)]
    assert ready.lags == [(0, 20)]
    assert ready.matured == said
    assert ready.window is not None
    assert ready.window.generations == 20
    assert dict(ready.left_out)["silent"] == 20 - said


def test_answers_of_older_versions_and_of_a_candidate_are_told_apart() -> None:
    story: Story = empty_lane(cadence=True)
    story.answer(10, seed=4)
    release = to_canary(story.world)
    Release.objects.filter(pk=release.pk).update(share=1.0)
    story.answer(5, first=50, seed=5)
    assert readiness_of(story.lane).lags == [(-1, 5), (0, 10)]


def test_a_lane_without_a_map_has_no_window() -> None:
    story = empty_lane()
    story.world.project.signal_maps.all().delete()
    ready = readiness_of(story.lane)
    assert ready.window is None
    assert ready.left_out == []
