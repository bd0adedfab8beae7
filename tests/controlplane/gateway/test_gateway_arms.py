"""Which arm answers whom: the same one at every request, through restarts, pauses and rising shares."""

import asyncio
from itertools import pairwise

import openai
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async

from benchmarks.scripted_engine import Reply, ScriptedEngine
from controlplane.gateway import state
from controlplane.gateway.state import Gateway
from controlplane.models import CanaryStep, Generation, Release
from controlplane.services.tenancy import api_key_revoke
from controlplane.states import Arm, GenerationOutcome, ReleaseState
from tests.controlplane.gateway.gateway_rig import MESSAGES, generation_of, listening
from tests.lane_rows import ACTOR, candidate_version

pytestmark = pytest.mark.django_db(transaction=True)

USERS = [f"user-{number}" for number in range(24)]


def canary_of(world, *, share, position=1):
    """A release of the lane in its canary."""
    release = Release.objects.create(
        lane=world.lane,
        version=candidate_version(world),
        incumbent=world.version(),
        state=ReleaseState.CANARY,
        salt="pepper",
        share=share,
        reason="test",
    )
    CanaryStep.objects.create(release=release, position=position, share=share)
    return release


@pytest_asyncio.fixture
async def script(bare):
    """A replica that says one token under whatever version it is asked for."""
    engine = ScriptedEngine(lambda body: Reply(tokens=[65], text="a"))
    async with engine.serving():
        engine.release = await sync_to_async(canary_of)(bare, share=0.5)
        versions = {"default": bare.version(), "candidate": engine.release.version}
        await sync_to_async(bare.place)(engine.url, versions=versions)
        yield engine


async def arms_of(client):
    """The arm of each user, by one request each."""
    arms = {}
    for user in USERS:
        answer = await client.chat.completions.create(
            model="assistant", messages=MESSAGES, extra_headers={"X-Slipway-User": user}
        )
        arms[user] = (await generation_of(answer)).arm
    return arms


def forget():
    """What a restart does: nothing is remembered."""
    Gateway._of_loop.clear()


async def test_users_keep_their_arm_through_restarts_and_pauses(bare, served, client, script):
    first = await arms_of(client)
    canary = [user for user, arm in first.items() if arm == Arm.CANARY]
    assert 4 <= len(canary) <= 20
    rows = Generation.objects.filter(lane=bare.lane)
    assert await rows.filter(release=script.release, canary_step=1).acount() == len(USERS)
    assert await rows.filter(arm=Arm.CANARY).exclude(version=script.release.version_id).acount() == 0
    assert {(body.slot, body.exact_version) for body in script.asked} == {
        ("default", str(bare.version())),
        ("candidate", str(script.release.version)),
    }
    forget()
    async with listening() as address:
        secret = await sync_to_async(bare.key)()
        async with openai.AsyncOpenAI(api_key=secret, base_url=f"{address}/v1", max_retries=0) as another:
            assert await arms_of(another) == first
    await Release.objects.aupdate(state=ReleaseState.PAUSED, paused_from=ReleaseState.CANARY)
    forget()
    assert await arms_of(client) == first
    await Release.objects.aupdate(state=ReleaseState.PAUSED, paused_from=ReleaseState.GATING)
    forget()
    assert set((await arms_of(client)).values()) == {Arm.PROMOTED}


async def test_a_rising_share_only_adds_users(bare, client, script):
    seen = []
    for position, share in enumerate((0.05, 0.3, 0.6, 1.0), start=2):
        await Release.objects.aupdate(share=share)
        await CanaryStep.objects.acreate(release=script.release, position=position, share=share)
        forget()
        arms = await arms_of(client)
        seen.append({user for user, arm in arms.items() if arm == Arm.CANARY})
        assert await Generation.objects.filter(canary_step=position).acount() == len(USERS)
    assert all(before <= after for before, after in pairwise(seen))
    assert seen[-1] == set(USERS)
    assert len(seen[0]) < len(seen[2])


async def test_without_a_user_key_the_promoted_version_answers_outside_the_experiment(bare, client, script):
    await Release.objects.aupdate(share=1.0)
    answer = await client.chat.completions.create(model="assistant", messages=MESSAGES)
    row = await generation_of(answer)
    assert (row.arm, row.release_id, row.canary_step, row.user_hash) == (Arm.PROMOTED, None, None, "")
    assert row.version_id == bare.version().id
    named = await client.chat.completions.create(model="assistant", messages=MESSAGES, user="by-the-body")
    assert (await generation_of(named)).arm == Arm.CANARY


async def test_a_rollback_reaches_requests_within_the_age_of_a_route(bare, client, script):
    await Release.objects.aupdate(share=1.0)
    headers = {"X-Slipway-User": "user-1"}
    before = await client.chat.completions.create(model="assistant", messages=MESSAGES, extra_headers=headers)
    await Release.objects.aupdate(state=ReleaseState.ROLLED_BACK)
    assert state.ROUTE_MAX_AGE_S <= 1.0
    await asyncio.sleep(state.ROUTE_MAX_AGE_S)
    after = await client.chat.completions.create(model="assistant", messages=MESSAGES, extra_headers=headers)
    assert [(await generation_of(answer)).arm for answer in (before, after)] == [Arm.CANARY, Arm.PROMOTED]


async def test_arms_never_cross(bare, client, script):
    """A canary that no replica holds fails for its users, under its own name: the guardrail sees it."""
    await Release.objects.aupdate(share=1.0)
    await sync_to_async(bare.place)(script.url, versions={"default": bare.version()})
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(
            model="assistant", messages=MESSAGES, extra_headers={"X-Slipway-User": "user-1"}
        )
    row = await Generation.objects.aget()
    assert (row.arm, row.outcome, row.canary_step) == (Arm.CANARY, GenerationOutcome.FAILED, 1)
    assert row.version_id == script.release.version_id
    assert (await client.chat.completions.create(model="assistant", messages=MESSAGES)).choices


async def test_both_arms_are_answered_by_one_engine_from_its_two_slots(world, client, engine):
    release = await sync_to_async(canary_of)(world, share=1.0)
    await sync_to_async(world.hold)(engine, release.version, slot="candidate")
    versions = {"default": world.version(), "candidate": release.version}
    await sync_to_async(world.place)(engine.url, versions=versions)
    answers = [
        await client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=3, extra_headers=headers)
        for headers in ({}, {"X-Slipway-User": "user-1"})
    ]
    assert [answer.system_fingerprint for answer in answers] == [str(world.version()), str(release.version)]


async def test_a_revoked_key_ends_within_the_age_of_a_key(bare, client, script, monkeypatch):
    assert state.KEY_MAX_AGE_S < 5
    monkeypatch.setattr(state, "KEY_FRESH_S", 0.1)
    monkeypatch.setattr(state, "KEY_MAX_AGE_S", 0.2)
    forget()
    assert (await client.chat.completions.create(model="assistant", messages=MESSAGES)).choices
    key = await bare.project.api_keys.aget()
    await sync_to_async(api_key_revoke)(key=key, actor=ACTOR)
    await asyncio.sleep(0.2)
    with pytest.raises(openai.AuthenticationError):
        await client.chat.completions.create(model="assistant", messages=MESSAGES)


async def test_nothing_is_asked_of_the_database_while_key_and_route_are_fresh(bare, client, script, monkeypatch):
    """Before the first token, that is: a request on a warm gateway asks its replica while no read is possible."""
    assert (await client.chat.completions.create(model="assistant", messages=MESSAGES)).choices

    def unreachable(*args, **options):
        raise AssertionError("the database was asked")

    gateway = Gateway.here()
    monkeypatch.setattr(gateway._keys, "_load", unreachable)
    monkeypatch.setattr(gateway._routes, "_load", unreachable)
    asked = len(script.asked)
    assert (await client.chat.completions.create(model="assistant", messages=MESSAGES)).choices
    assert len(script.asked) == asked + 1
