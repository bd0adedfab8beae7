"""A shadow through its worker: recorded prompts are asked of a real engine that holds the candidate beside the rest."""

from __future__ import annotations

import pytest

from controlplane.conductor.shipping import advance_lanes
from controlplane.models import Lane, Release, ReplicaSlot, WorkUnit
from controlplane.services.shadows import shadow_begin
from controlplane.states import ReleaseState, WorkKind, WorkState
from rl_core.store import open_store
from tests.controlplane.gateway.conftest import bare, engine, folder
from tests.lane_rows import ACTOR, candidate_version
from tests.shipping_rig import Users, propose, set_cadence
from tests.simulated_workers import due
from workers import base, shadow

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["bare", "engine", "folder"]


@pytest.fixture
def world(bare, engine, settings):
    """A lane whose engine holds the promoted version; some of its users allowed their prompts to be used."""
    base.store.cache_clear()
    set_cadence(bare, shadow={"prompts": 6, "max_tokens": 5})
    bare.hold(engine, bare.version())
    bare.place(engine.url)
    users = Users(bare, store=open_store(settings.STORE_URL))
    for number in range(4):
        users.ask(f"u{number}", prompt=[1, 2 + number], consent="train")
    users.ask("private", prompt=[1, 9])
    yield bare
    base.store.cache_clear()


def in_shadow(world, version) -> Release:
    release = propose(world, version=version)
    Release.objects.filter(pk=release.pk).update(state=ReleaseState.GATING, gate={"verdict": "pass"})
    ReplicaSlot.objects.filter(replica__cluster=world.cluster, slot="candidate").update(current_version=version)
    return shadow_begin(release=Release.objects.get(pk=release.pk), actor=ACTOR)


def replay(release: Release) -> WorkUnit:
    unit = WorkUnit.objects.get(kind=WorkKind.SHADOW, ref=release.pk)
    due(unit)
    base.work_on(unit.pk, shadow.shadow)
    unit.refresh_from_db()
    release.refresh_from_db()
    return unit


def test_every_consented_prompt_is_answered_and_compared(world, engine):
    version = candidate_version(world)
    world.hold(engine, version, slot="candidate")
    release = in_shadow(world, version)
    generations = world.lane.generations.count()
    unit = replay(release)
    assert unit.state == WorkState.DONE, unit.error
    found = release.shadow
    assert (found["asked"], found["n"]) == (4, 4)
    assert set(found["effects"]) == {"refusal", "question", "invalid_tool_calls", "tokens"}
    assert found["effects"]["tokens"]["incumbent"] == 3.0
    assert 1 <= found["effects"]["tokens"]["candidate"] <= 5
    assert world.lane.generations.count() == generations  # no user saw it, and nothing of it is kept
    advance_lanes()
    release.refresh_from_db()
    assert release.state in (ReleaseState.CANARY, ReleaseState.SKIPPED, ReleaseState.FAILED)


def test_a_candidate_that_no_engine_answers_with_is_tried_again_and_then_no_data(world):
    release = in_shadow(world, candidate_version(world))  # the rows say it is there; the engine knows better
    assert replay(release).state == WorkState.DONE
    assert (release.shadow["verdict"], release.shadow["n"]) == ("undecided", 0)
    advance_lanes()
    release.refresh_from_db()
    assert release.state == ReleaseState.SKIPPED


def test_without_a_replica_the_unit_fails_and_is_queued_again(world):
    release = in_shadow(world, candidate_version(world))
    ReplicaSlot.objects.filter(slot="candidate").update(current_version=None)
    unit = replay(release)
    assert (unit.state, unit.error_code) == (WorkState.QUEUED, "engine_unreachable")
    assert Lane.objects.get(pk=world.lane.pk).promoted_version == world.version()
