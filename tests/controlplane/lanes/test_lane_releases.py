"""Releases: gated, approved by others, promoted, rolled back; rewards and windows by value."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.errors import Conflict, Forbidden, Invalid, StaleRevision
from controlplane.models import (
    BatchItem,
    Feedback,
    PolicyVersion,
    Release,
    ReplicaSlot,
    ServedVersion,
)
from controlplane.selectors.statistics import paired_interval
from controlplane.services.feedback import feedback_receive
from controlplane.services.lanes import lane_served_at
from controlplane.services.promotions import release_promote, release_rollback
from controlplane.services.releases import release_approve, release_end, release_propose
from controlplane.services.signals import signal_define, signal_map_publish
from controlplane.services.windows import window_collect
from controlplane.states import Consent, FeedbackState, ReleaseState, SignalType, VersionState
from rl_core.store import open_store
from rl_core.types import SamplingParams
from tests.lane_rows import ACTOR, candidate_version, lane_world, person, thumbs

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def passed(world, version, proposer):
    """A release whose gate has passed and whose candidate is resident."""
    release = release_propose(
        lane=world.lane, version=version, run=None, proposer=proposer, actor=ACTOR, reason="better"
    )
    Release.objects.filter(id=release.id).update(state=ReleaseState.GATING, gate={"verdict": "pass"})
    ReplicaSlot.objects.filter(replica=world.replica, slot="candidate").update(
        desired_version=version, current_version=version
    )
    release.refresh_from_db()
    return release


@pytest.mark.django_db(transaction=True)
def test_promotion_needs_somebody_else_then_moves_the_pointer_and_nothing_else(store):
    world = lane_world()
    incumbent = world.lane.promoted_version
    version, proposer, other = candidate_version(world), person("ann"), person("bob")
    release = passed(world, version, proposer)
    with pytest.raises(Conflict, match="approval"):
        release_promote(release=release, actor=ACTOR, reason="go")
    with pytest.raises(Forbidden):
        release_approve(release=release, user=proposer, actor=ACTOR, reason="mine is fine")
    release_approve(release=release, user=other, actor=ACTOR, reason="looks right")
    promoted = release_promote(release=release, actor=ACTOR, reason="go", expected_revision=release.revision)
    world.lane.refresh_from_db()
    assert promoted.state == ReleaseState.PROMOTED
    assert world.lane.promoted_version == version
    sources = dict(ReplicaSlot.objects.filter(replica=world.replica).values_list("slot", "desired_source"))
    assert sources == {"candidate": "promoted", "default": "candidate"}
    serving = ServedVersion.objects.get(lane=world.lane, until__isnull=True)
    assert serving.version == version
    moment = serving.created_at
    before = lane_served_at(lane=world.lane, at=moment - timedelta(microseconds=1))
    assert before is not None
    assert before.version == incumbent
    now = lane_served_at(lane=world.lane, at=timezone.now())
    assert now is not None
    assert now.version == version


@pytest.mark.parametrize("gate", [{}, {"verdict": "fail"}, {"verdict": "inconclusive"}])
def test_no_passed_gate_no_promotion(gate):
    world = lane_world(approvals=0)
    release = passed(world, candidate_version(world), person("ann"))
    Release.objects.filter(id=release.id).update(gate=gate)
    with pytest.raises(Conflict, match="verdict"):
        release_promote(release=release, actor=ACTOR, reason="go")
    world.lane.refresh_from_db()
    assert world.lane.promoted_version.number == 0


def test_promotion_refuses_a_version_that_a_replica_lacks_and_a_stale_revision():
    world = lane_world(approvals=0)
    release = passed(world, candidate_version(world), person("ann"))
    with pytest.raises(StaleRevision):
        release_promote(release=release, actor=ACTOR, reason="go", expected_revision=release.revision + 1)
    ReplicaSlot.objects.filter(replica=world.replica, slot="candidate").update(current_version=None)
    with pytest.raises(Conflict, match="do not hold"):
        release_promote(release=release, actor=ACTOR, reason="go")


def test_rollback_restores_the_incumbent_and_quarantines_the_bad_version(store):
    world = lane_world(approvals=0)
    incumbent = world.lane.promoted_version
    version = candidate_version(world)
    child = PolicyVersion.objects.create(
        lineage=version.lineage, epoch=0, number=2, state=VersionState.PUBLISHING, parent=version
    )
    release = release_promote(release=passed(world, version, None), actor=ACTOR, reason="go")
    world.lane.refresh_from_db()
    generation = world.generate(store, version=version)
    given = feedback_receive(
        project=world.project, sender="k", source=None, data=thumbs(generation.id, value=False), actor=ACTOR
    )
    with pytest.raises(Invalid):
        release_rollback(release=release, actor=ACTOR, reason=" ")
    rolled = release_rollback(release=release, actor=ACTOR, reason="complaints")
    world.lane.refresh_from_db()
    version.refresh_from_db()
    child.refresh_from_db()
    assert rolled.state == ReleaseState.ROLLED_BACK
    assert world.lane.promoted_version == incumbent
    assert version.quarantined_at is not None
    assert child.quarantined_at is not None
    assert Feedback.objects.get(id=given.feedback_id).state == FeedbackState.QUARANTINED
    late = feedback_receive(project=world.project, sender="k", source=None, data=thumbs(generation.id), actor=ACTOR)
    assert Feedback.objects.get(id=late.feedback_id).state == FeedbackState.QUARANTINED
    with pytest.raises(Conflict):
        release_rollback(release=rolled, actor=ACTOR, reason="again")
    with pytest.raises(Invalid):
        release_propose(lane=world.lane, version=version, run=None, proposer=None, actor=ACTOR, reason="retry")


def test_one_release_at_a_time_and_the_next_after_it_ended():
    world = lane_world()
    first = release_propose(
        lane=world.lane, version=candidate_version(world), run=None, proposer=None, actor=ACTOR, reason="a"
    )
    second = candidate_version(world, root="c" * 64)
    with pytest.raises(Conflict, match="in flight"):
        release_propose(lane=world.lane, version=second, run=None, proposer=None, actor=ACTOR, reason="b")
    release_end(release=first, actor=ACTOR, reason="superseded")
    assert release_propose(lane=world.lane, version=second, run=None, proposer=None, actor=ACTOR, reason="b").pk


def test_the_promoted_version_cannot_be_proposed():
    world = lane_world()
    with pytest.raises(Invalid):
        release_propose(
            lane=world.lane, version=world.lane.promoted_version, run=None, proposer=None, actor=ACTOR, reason="x"
        )


def test_the_window_takes_what_is_allowed_and_rewards_by_the_map(store):
    world = lane_world()
    signal_define(project=world.project, slug="kept", value_type=SignalType.NUMBER, minimum=0, maximum=2)
    content = {
        "signals": {
            "thumbs": {"values": {"true": 1.0, "false": -1.0}, "weight": 1.0},
            "kept": {"low": 0.0, "high": 1.0, "weight": 3.0},
        }
    }
    signal_map_publish(project=world.project, content=content, author=None, actor=ACTOR)
    both, silent = world.generate(store), world.generate(store)
    greedy = world.generate(store, sampling=SamplingParams(temperature=0.0))
    private = world.generate(store, consent=Consent.NONE)
    evaluated = world.generate(store, consent=Consent.EVAL)
    for generation in (both, greedy, private, evaluated):
        feedback_receive(project=world.project, sender="k", source=None, data=thumbs(generation.id), actor=ACTOR)
    feedback_receive(
        project=world.project, sender="k", source=None, data=thumbs(both.id, signal="kept", value=1.0), actor=ACTOR
    )
    window = window_collect(lane=world.lane)
    sampled = [item for item in window.items if item.objective == "policy_gradient"]
    assert [(item.generation.id, item.reward) for item in sampled] == [(both.id, (1.0 + 3.0 * 0.5) / 4.0)]
    assert (window.generations, window.silent, window.untrainable, window.without_consent) == (5, 1, 1, 2)
    assert silent.id not in {item.generation.id for item in window.items}
    assert not BatchItem.objects.exists()


def test_pressing_thumbs_twice_is_no_louder_and_the_newest_word_counts(store):
    world = lane_world()
    generation = world.generate(store)
    earlier = (timezone.now() - timedelta(minutes=1)).isoformat()
    for body in (thumbs(generation.id, value=True, occurred_at=earlier), thumbs(generation.id, value=False)):
        feedback_receive(project=world.project, sender="k", source=None, data=body, actor=ACTOR)
    assert [item.reward for item in window_collect(lane=world.lane).items] == [0.0]


def test_a_map_of_undefined_signals_or_wild_rewards_is_refused():
    world = lane_world()
    for content in (
        {"signals": {"applause": {}}},
        {"signals": {"thumbs": {"values": {"true": 5.0}}}},
        {"signals": {}, "extra": 1},
    ):
        with pytest.raises(Invalid):
            signal_map_publish(project=world.project, content=content, author=None, actor=ACTOR)


@pytest.mark.parametrize(("shift", "verdict"), [(0.2, "pass"), (0.0, "pass"), (-0.5, "fail"), (-0.05, "inconclusive")])
def test_the_gate_is_non_inferiority_of_paired_differences(shift, verdict):
    from controlplane.services.gating import judge_differences

    noise = [0.0] * 40 if shift in (0.2, 0.0) else [0.3, -0.3] * 20
    result = judge_differences([shift + value for value in noise], margin=0.02)
    assert result["verdict"] == verdict
    assert result["difference"] == pytest.approx(paired_interval([shift + value for value in noise]).mean)


def test_no_data_is_not_a_pass():
    from controlplane.services.gating import judge_differences

    assert judge_differences([], margin=0.02)["verdict"] == "inconclusive"
    assert judge_differences([1.0], margin=0.02)["verdict"] == "inconclusive"
