"""Generations: what production asked and the model answered, kept as far as consent goes."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from dataclasses import dataclass

import msgspec
from django.db import transaction
from django.db.models.functions import Now

from controlplane.models import Feedback, Generation, Lane, PolicyVersion
from controlplane.services.events import Actor, event_append, lane_topic
from controlplane.states import Arm, Consent, EventType, FeedbackState
from rl_core.store import ObjectStore
from rl_core.types import (
    Ending,
    FinishReason,
    Generated,
    Message,
    Role,
    SamplingParams,
    TokenSegment,
    Trajectory,
    VersionSpan,
)

_WIDTH = {Consent.NONE: 0, Consent.EVAL: 1, Consent.TRAIN: 2}


def narrowest(*consents: str) -> Consent:
    """The narrowest of several consents: whoever allows least decides."""
    return min((Consent(consent) for consent in consents), key=lambda consent: _WIDTH[consent])


def user_hash(*, lane: Lane, user_key: str) -> str:
    """The user key under the lane's salt; empty without a key. The key itself is never stored."""
    if not user_key:
        return ""
    return hmac.new(lane.salt.encode(), user_key.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered request, as the gateway saw it."""

    generation_id: uuid.UUID
    messages: list[dict[str, str]]
    prompt_token_ids: list[int]
    generated: Generated
    sampling: SamplingParams
    latency_ms: float


def trajectory_of(answer: Answer) -> Trajectory:
    """The answer as a single-segment trajectory, which the trainer and the trajectory page read."""
    prompt, sampled = answer.prompt_token_ids, answer.generated.token_ids
    offset = len(prompt)
    spans = [VersionSpan(span.start + offset, span.end + offset, span.version) for span in answer.generated.spans]
    segment = TokenSegment(
        token_ids=[*prompt, *sampled],
        loss_mask=[0] * offset + [1] * len(sampled),
        logprobs=[0.0] * offset + answer.generated.logprobs,
        spans=spans,
        sampling=answer.sampling,
        routes=answer.generated.routes,
    )
    asked = [
        Message(role=Role(message["role"]), content=message["content"], parent=index - 1, segment=0)
        for index, message in enumerate(answer.messages)
    ]
    reply = Message(
        role=Role.ASSISTANT,
        content=answer.generated.text,
        parent=len(asked) - 1,
        segment=0,
        start=offset,
        end=offset + len(sampled),
    )
    truncated = answer.generated.finish_reason == FinishReason.LENGTH
    return Trajectory(
        task_id=str(answer.generation_id),
        messages=[*asked, reply],
        segments=[segment],
        ending=Ending.TRUNCATED if truncated else Ending.TERMINATED,
    )


def generation_record(
    *,
    lane: Lane,
    version: PolicyVersion,
    answer: Answer,
    user_key: str,
    session: str,
    consent: Consent,
    store: ObjectStore,
) -> Generation:
    """Store the generation, and join feedback that came before it.

    Content is written only when consent and the project allow more than metadata: the narrowest wins.
    """
    effective = narrowest(consent, lane.project.consent)
    content_key = "" if effective == Consent.NONE else store.put_blob(trajectory_of(answer).to_bytes())
    with transaction.atomic():
        generation = Generation.objects.create(
            id=answer.generation_id,
            lane=lane,
            arm=Arm.PROMOTED,
            version=version,
            user_hash=user_hash(lane=lane, user_key=user_key),
            session=session[:200],
            consent=effective,
            content_key=content_key,
            sampling=msgspec.to_builtins(answer.sampling),
            trainable=answer.sampling.trainable,
            prompt_tokens=len(answer.prompt_token_ids),
            sampled_tokens=len(answer.generated.token_ids),
            finish_reason=answer.generated.finish_reason,
            latency_ms=answer.latency_ms,
        )
        Feedback.objects.filter(
            project_id=lane.project_id, state=FeedbackState.PENDING, target_id=str(answer.generation_id)
        ).update(state=FeedbackState.JOINED, generation_id=answer.generation_id)
    return generation


def user_erase(*, lane: Lane, user_key: str, actor: Actor, reason: str, store: ObjectStore) -> int:
    """Delete what is kept of a user's content on a lane; content-free tombstones stay. Returns generations erased.

    Rows are emptied before blobs are deleted, so that nothing ever names a missing blob. Comments and demonstrations of
    feedback on those generations go too.
    """
    hashed = user_hash(lane=lane, user_key=user_key)
    with transaction.atomic():
        rows = list(Generation.objects.select_for_update().filter(lane=lane, user_hash=hashed, erased_at__isnull=True))
        ids = [row.id for row in rows]
        keys = [row.content_key for row in rows if row.content_key]
        Generation.objects.filter(id__in=ids).update(
            content_key="", user_hash="", session="", sampling={}, consent=Consent.NONE, erased_at=Now()
        )
        Feedback.objects.filter(generation_id__in=ids).update(comment="", demonstration="", tags={}, actor_hash="")
        event_append(
            project_id=lane.project_id,
            topic=lane_topic(lane.id),
            event_type=EventType.USER_ERASED,
            actor=actor,
            reason=reason,
            data={"generations": len(ids)},
        )
    for key in keys:
        store.delete(key)
    return len(ids)
