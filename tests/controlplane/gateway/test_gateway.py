"""The gateway as an application sees it: OpenAI's library against the real web process and a real engine."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
import uuid

import openai
import pytest
from asgiref.sync import sync_to_async

from controlplane.models import Feedback, Generation, Lane, RejectedPayload, Replica, ReplicaSlot
from controlplane.services.sources import source_create, source_rotate
from controlplane.states import Arm, GenerationOutcome, Scope
from rl_core.chat import ChatTokenizer
from rl_core.store import open_store
from rl_core.types import Trajectory
from tests.controlplane.gateway.gateway_rig import MESSAGES, openai_client
from tests.lane_rows import ACTOR, lane_world, thumbs

pytestmark = pytest.mark.django_db(transaction=True)


async def test_an_openai_client_is_answered_and_the_generation_recorded(world, web, folder, settings):
    client = openai_client(web, await sync_to_async(world.key)())
    assert [model.id async for model in client.models.list()] == ["assistant"]
    headers = {"X-Slipway-User": "user-7", "X-Slipway-Session": "s1", "X-Slipway-Consent": "train"}
    headers["X-Slipway-Segment"] = "free"
    answer = await client.chat.completions.create(
        model="assistant", messages=MESSAGES, max_tokens=9, seed=3, logprobs=True, extra_headers=headers
    )
    generation = await Generation.objects.aget(id=answer.id.removeprefix("chatcmpl-"))
    assert answer.choices[0].finish_reason == "length"
    assert answer.system_fingerprint == str(world.lane.promoted_version)
    assert (generation.sampled_tokens, generation.session, generation.consent) == (9, "s1", "train")
    assert generation.segment == "free"
    assert generation.user_hash
    assert "user-7" not in generation.user_hash
    assert generation.trainable
    assert (generation.outcome, generation.arm, generation.release_id) == (
        GenerationOutcome.ANSWERED,
        Arm.PROMOTED,
        None,
    )
    assert 0 < generation.first_token_ms < generation.latency_ms
    assert generation.behaviour["tokens"] == 9
    assert len(generation.prompt_hash) == 64
    assert answer.choices[0].generation_id == str(generation.id)
    assert answer._request_id
    trajectory = Trajectory.from_bytes(open_store(settings.STORE_URL).get_blob(generation.content_key))
    prompt = ChatTokenizer.load(folder).render([{"role": "system", "content": "Be short."}, *MESSAGES])
    segment = trajectory.segments[0]
    assert segment.token_ids[: len(prompt)] == prompt
    assert [token.logprob for token in answer.choices[0].logprobs.content] == segment.logprobs[len(prompt) :]
    assert trajectory.messages[-1].content == answer.choices[0].message.content


async def test_greedy_generations_are_marked_as_not_trainable(world, web):
    client = openai_client(web, await sync_to_async(world.key)())
    answer = await client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=3, temperature=0)
    assert not (await Generation.objects.aget(id=answer.id.removeprefix("chatcmpl-"))).trainable


@pytest.mark.parametrize(
    ("scopes", "header", "expected"),
    [
        ([Scope.FEEDBACK], None, openai.PermissionDeniedError),
        ([Scope.GATEWAY], "slw_nonsense_key", openai.AuthenticationError),
    ],
)
async def test_keys_without_the_scope_or_unknown_are_refused(world, web, scopes, header, expected):
    secret = header or await sync_to_async(world.key)(*scopes)
    with pytest.raises(expected):
        await openai_client(web, secret).chat.completions.create(model="assistant", messages=MESSAGES)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": 99}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 9}, "n"),
        ({"stream": 3}, "stream"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x" * 200_001}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ({"extra_headers": {"X-Slipway-Consent": "all"}}, "X-Slipway-Consent"),
        ({"extra_headers": {"X-Slipway-Session": "s" * 201}}, "X-Slipway-Session"),
        ({"extra_headers": {"X-Slipway-Segment": "people who pay"}}, "X-Slipway-Segment"),
        ({"extra_headers": {"X-Slipway-Segment": "s" * 65}}, "X-Slipway-Segment"),
    ],
)
async def test_bad_requests_are_400_in_openais_shape(world, web, change, param):
    client = openai_client(web, await sync_to_async(world.key)())
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{"model": "assistant", "messages": MESSAGES, **change})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert not await Generation.objects.aexists()


async def test_a_prompt_that_the_engine_refuses_is_400_and_no_generation(world, web):
    client = openai_client(web, await sync_to_async(world.key)())
    with pytest.raises(openai.BadRequestError, match="holds 512"):
        await client.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "x" * 600}])
    assert not await Generation.objects.aexists()


async def test_an_unknown_lane_is_404_and_a_lane_without_a_replica_503(world, web):
    client = openai_client(web, await sync_to_async(world.key)())
    for name in ("other", "no lane", "nul\x00"):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model=name, messages=MESSAGES)
        assert missing.value.code == "model_not_found"
    await Replica.objects.filter(pk=world.replica.pk).aupdate(inference_url="http://127.0.0.1:9")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="assistant", messages=MESSAGES)
    assert (caught.value.status_code, caught.value.response.headers["Retry-After"]) == (503, "2")
    failed = await Generation.objects.aget(lane=world.lane)
    assert (failed.outcome, failed.sampled_tokens, failed.first_token_ms) == (GenerationOutcome.FAILED, 0, None)
    assert (failed.content_key, failed.behaviour, failed.trainable) == ("", {}, False)


async def test_other_paths_and_methods_are_refused_in_openais_shape(world, web):
    headers = {"Authorization": f"Bearer {await sync_to_async(world.key)()}"}
    for method, path, status in (("GET", "chat/completions", 405), ("POST", "embeddings", 404)):
        reply = await web.request(method, f"/v1/{path}", headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, "invalid_request_error")
    client = openai_client(web, headers["Authorization"].removeprefix("Bearer "))
    assert (await client.models.retrieve("assistant")).owned_by == world.project.slug
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_a_version_that_the_engine_lacks_is_never_answered_by_another(world, web):
    """The database says that the replica holds another version than it does: refused, not answered wrongly."""
    client = openai_client(web, await sync_to_async(world.key)())
    other = await sync_to_async(lambda: lane_world().lane.promoted_version)()
    await Lane.objects.filter(pk=world.lane.pk).aupdate(promoted_version=other)
    await ReplicaSlot.objects.filter(replica=world.replica).aupdate(current_version=other)
    with pytest.raises(openai.InternalServerError, match="holds the lane's version yet"):
        await client.chat.completions.create(model="assistant", messages=MESSAGES)
    assert (await Generation.objects.aget(lane=world.lane)).outcome == GenerationOutcome.FAILED


async def test_thumbs_on_an_answer_are_joined_over_the_api(world, web):
    client = openai_client(web, await sync_to_async(world.key)())
    answer = await client.chat.completions.create(
        model="assistant", messages=MESSAGES, max_tokens=3, extra_headers={"X-Slipway-Consent": "train"}
    )
    headers = {"Authorization": f"Bearer {await sync_to_async(world.key)(Scope.FEEDBACK)}"}
    body = thumbs(answer.id)
    first = await web.post("/api/v1/feedback", json=body, headers=headers)
    again = await web.post("/api/v1/feedback", json=body, headers=headers)
    other = await web.post("/api/v1/feedback", json={**body, "value": False}, headers=headers)
    early = await web.post("/api/v1/feedback", json=thumbs(uuid.uuid4()), headers=headers)
    wrong = await web.post("/api/v1/feedback", json=thumbs(answer.id, signal="none"), headers=headers)
    assert [reply.status_code for reply in (first, again, other, early, wrong)] == [201, 200, 409, 202, 404]
    assert again.json()["duplicate"] is True
    assert wrong.headers["Content-Type"] == "application/problem+json"
    assert wrong.json()["field"] == "signal"
    assert await RejectedPayload.objects.filter(project=world.project, code="not_found").acount() == 1
    batch = {"items": [thumbs(answer.id), {"event_id": "x"}, thumbs(uuid.uuid4())]}
    reply = await web.post("/api/v1/feedback/batch", json=batch, headers=headers)
    assert reply.status_code == 207
    assert [(item["index"], item["status"]) for item in reply.json()["accepted"]] == [(0, 201), (2, 202)]
    assert [(item["index"], item["status"]) for item in reply.json()["errors"]] == [(1, 422)]


async def test_feedback_needs_its_scope(world, web):
    body = thumbs(uuid.uuid4())
    for headers, status in (
        ({}, 401),
        ({"Authorization": f"Bearer {await sync_to_async(world.key)(Scope.READ)}"}, 403),
    ):
        assert (await web.post("/api/v1/feedback", json=body, headers=headers)).status_code == status


def signed(secret, body, *, message_id="m1", at=None):
    stamp = str(int(at or time.time()))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    mac = hmac.new(key, f"{message_id}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": stamp,
        "webhook-signature": f"v1,{base64.b64encode(mac).decode()}",
        "Content-Type": "application/json",
    }


async def test_signed_webhooks_are_taken_and_rotation_keeps_two_secrets(world, web):
    slug = f"shop-{uuid.uuid4().hex[:6]}"
    source, first = await sync_to_async(source_create)(project=world.project, slug=slug, actor=ACTOR)
    second = await sync_to_async(source_rotate)(source=source, actor=ACTOR)
    for secret in (first, second):
        body = json.dumps(thumbs(uuid.uuid4())).encode()
        reply = await web.post(f"/hooks/v1/{slug}", content=body, headers=signed(secret, body))
        assert reply.status_code == 202, reply.text
    await sync_to_async(source_rotate)(source=source, actor=ACTOR)
    body = json.dumps(thumbs(uuid.uuid4())).encode()
    assert (await web.post(f"/hooks/v1/{slug}", content=body, headers=signed(first, body))).status_code == 401
    assert await Feedback.objects.filter(project=world.project, sender=slug).acount() == 2


async def test_a_third_party_signer_interoperates(world, web):
    from datetime import UTC, datetime

    from standardwebhooks import Webhook

    slug = f"shop-{uuid.uuid4().hex[:6]}"
    _, secret = await sync_to_async(source_create)(project=world.project, slug=slug, actor=ACTOR)
    body = json.dumps(thumbs(uuid.uuid4()))
    now = datetime.now(UTC)
    signature = Webhook(secret).sign("msg_1", now, body)
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": signature,
        "Content-Type": "application/json",
    }
    assert (await web.post(f"/hooks/v1/{slug}", content=body.encode(), headers=headers)).status_code == 202


async def test_hostile_webhooks_are_refused_without_a_500(world, web):
    slug = f"shop-{uuid.uuid4().hex[:6]}"
    _, secret = await sync_to_async(source_create)(project=world.project, slug=slug, actor=ACTOR)
    good = json.dumps(thumbs(uuid.uuid4())).encode()
    cases = [
        ({}, good, 401),
        ({**signed(secret, good), "webhook-signature": "v1"}, good, 401),
        ({**signed(secret, good), "webhook-signature": "v1,\u00ff".encode("latin1").decode("latin1")}, good, 401),
        (signed(secret, good, at=time.time() - 400), good, 401),
        ({**signed(secret, good), "webhook-timestamp": "9" * 400}, good, 401),
        ({**signed(secret, good), "Content-Type": "text/plain"}, good, 415),
        (signed(secret, b"\xff\xfe"), b"\xff\xfe", 400),
        (signed(secret, b"[" * 60_000), b"[" * 60_000, 422),
        (signed(secret, b"NaN"), b"NaN", 400),
        (signed(secret, b"[]"), b"[]", 422),
        (signed(secret, b"x" * 70_000), b"x" * 70_000, 413),
    ]
    for headers, body, status in cases:
        encoded = [(name.encode(), value.encode("latin1")) for name, value in headers.items()]
        reply = await web.post(f"/hooks/v1/{slug}", content=body, headers=encoded)
        assert reply.status_code == status, (status, reply.status_code, reply.text)
    unknown = await web.post("/hooks/v1/nobody", content=good, headers=signed(secret, good))
    assert unknown.status_code == 404
    assert await RejectedPayload.objects.filter(project=world.project, sender=slug).acount() == 5


@pytest.mark.parametrize("url", ["http://gpu..example:1", "http://-\u20ac\u2028:1"])
async def test_a_replica_at_no_address_is_passed_over(world, web, engine, url):
    """Whichever replica is tried first, the next one answers."""
    await sync_to_async(world.place)(url, name="serving-1")
    client = openai_client(web, await sync_to_async(world.key)())
    for number in range(4):
        messages = [{"role": "user", "content": f"Hello {number}"}]
        assert (await client.chat.completions.create(model="assistant", messages=messages, max_tokens=2)).choices
