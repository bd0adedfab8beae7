"""What the page shows of a version's behaviour is what the monitor would call a person for."""

from __future__ import annotations

import pytest

from controlplane.selectors.pages_watch import watch_view
from controlplane.services.monitors import lane_watch
from tests.controlplane.lanes.test_monitors import MONITORS, answers, promoted
from tests.shipping_rig import lane_of, shipping_world

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(("count", "refusals"), [(120, 0.0), (120, 0.05), (120, 0.4), (40, 0.9)])
def test_what_moved_on_the_page_is_what_is_raised(count: int, refusals: float) -> None:
    world = shipping_world(monitors=MONITORS)
    release = promoted(world)
    answers(world, release.incumbent, 120)
    answers(world, release.version, count, refusals=refusals)
    view = watch_view(lane_of(world))
    assert (view.version, view.baseline) == (release.version, release.incumbent)
    raised = [alert.detail["behaviour"] for alert in lane_watch(lane_of(world))]
    assert [row.key for row in view.rows if row.moved] == raised
    [refused] = [row for row in view.rows if row.key == "refusal"]
    assert refused.now == pytest.approx(refusals, abs=0.03)
    assert refused.enough == (count >= 50)


def test_length_is_compared_with_the_baselines() -> None:
    world = shipping_world(monitors=MONITORS)
    release = promoted(world)
    answers(world, release.incumbent, 60)
    answers(world, release.version, 60)
    for version, tokens in ((release.incumbent, 20), (release.version, 80)):
        for row in world.lane.generations.filter(version=version):
            row.behaviour["tokens"] = tokens + row.id.int % 5
            row.save(update_fields=["behaviour"])
    [length] = [row for row in watch_view(lane_of(world)).rows if row.relative]
    assert length.before == pytest.approx(22, abs=1)
    assert length.difference == pytest.approx(60 / 22, abs=0.3)
    assert length.moved
    assert [alert.detail["behaviour"] for alert in lane_watch(lane_of(world))] == ["tokens"]


def test_gates_and_users_that_part_are_shown_apart() -> None:
    world = shipping_world(monitors=MONITORS)
    release = promoted(world, difference=0.5)
    answers(world, release.incumbent, 80, likes=0.6)
    answers(world, release.version, 80, likes=0.5, seed=1)
    gap = watch_view(lane_of(world)).divergence
    assert gap is not None
    assert gap.gate == 0.5
    assert gap.apart == any(alert.kind == "divergence" for alert in lane_watch(lane_of(world)))


def test_a_lane_with_one_version_has_nothing_to_compare() -> None:
    view = watch_view(lane_of(shipping_world()))
    assert view.version is None
    assert view.rows == []
