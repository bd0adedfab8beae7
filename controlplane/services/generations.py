"""Generations: what production asked and the model answered, kept as far as consent goes."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from django.db import DatabaseError, transaction

from controlplane.models import Generation, Lane, PolicyVersion
from controlplane.services.assignments import Assignment
from controlplane.services.blobs import blob_put
from controlplane.services.joins import generation_joined
from controlplane.services.redaction import RedactionFailed, Redactor
from controlplane.states import Arm, Consent, GenerationOutcome
from rl_core.errors import StoreError
from rl_core.signals.behaviour import behaviour_of
from rl_core.store import ObjectStore
from rl_core.types import (
    Ending,
    FinishReason,
    Generated,
    Message,
    Role,
    SamplingParams,
    TokenSegment,
    ToolCall,
    Trajectory,
    VersionSpan,
)

SESSION_CHARACTERS = 200
SEGMENT_CHARACTERS = 64
OUTSIDE = Assignment(Arm.PROMOTED)

_WIDTH = {Consent.NONE: 0, Consent.EVAL: 1, Consent.TRAIN: 2}

log = structlog.get_logger(__name__)


def narrowest(*consents: str) -> Consent:
    """The narrowest of several consents: whoever allows least decides."""
    return min((Consent(consent) for consent in consents), key=lambda consent: _WIDTH[consent])


def user_hash(*, lane: Lane, user_key: str) -> str:
    """The user key under the lane's salt; empty without a key. The key itself is never stored."""
    if not user_key:
        return ""
    return hmac.new(lane.salt.encode(), user_key.encode(), hashlib.sha256).hexdigest()


def content_sampled(*, generation_id: uuid.UUID, share: float) -> bool:
    """Whether this generation is among the share whose content is kept: by a hash of its id, which is no secret."""
    digest = hashlib.sha256(generation_id.bytes).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53 < share


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request's end, as the gateway saw it. `tool_calls` are all that were tried, malformed ones too."""

    generation_id: uuid.UUID
    messages: list[dict[str, str]]
    prompt_token_ids: list[int]
    generated: Generated
    sampling: SamplingParams
    latency_ms: float
    first_token_ms: float | None = None
    tool_calls: Sequence[ToolCall] = ()
    outcome: GenerationOutcome = GenerationOutcome.ANSWERED


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
        Message(
            role=Role(message["role"]),
            content=message["content"],
            name=message.get("name", ""),
            parent=index - 1,
            segment=0,
        )
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
    cut_off = answer.generated.finish_reason is not FinishReason.STOP
    return Trajectory(
        task_id=str(answer.generation_id),
        messages=[*asked, reply],
        segments=[segment],
        tool_calls=list(answer.tool_calls),
        ending=Ending.TRUNCATED if cut_off else Ending.TERMINATED,
    )


def trajectory_redacted(trajectory: Trajectory, redactor: Redactor) -> Trajectory:
    """The trajectory without what must not be kept; the very same when nothing was found. Raises: RedactionFailed.

    Tokens would say what the text no longer does: a redacted trajectory has messages alone, no segments.
    """
    messages = [
        msgspec.structs.replace(
            message,
            content=redactor.text(message.content),
            name=redactor.text(message.name),
            segment=-1,
            start=0,
            end=0,
        )
        for message in trajectory.messages
    ]
    calls = [
        msgspec.structs.replace(call, tool=redactor.text(call.tool), arguments=redactor.text(call.arguments))
        for call in trajectory.tool_calls
    ]
    for segment in trajectory.segments:
        for stop in segment.sampling.stop:
            redactor.text(stop)
    if not redactor.count:
        return trajectory
    return msgspec.structs.replace(trajectory, messages=messages, tool_calls=calls, segments=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What of a generation may be written down."""

    consent: Consent
    session: str = ""
    segment: str = ""
    trajectory: Trajectory | None = None
    prompt_hash: str = ""
    trainable: bool = False


def generation_record(
    *,
    lane: Lane,
    version: PolicyVersion,
    answer: Answer,
    user_key: str,
    session: str,
    consent: Consent,
    store: ObjectStore,
    assignment: Assignment = OUTSIDE,
    segment: str = "",
) -> Generation:
    """Store the generation, and join feedback that came before it.

    Content is written only when request and project consent to more than metadata (the narrowest wins, as it is now),
    when the generation is in the lane's share, and without what the lane redacts.
    """
    kept = _keep(lane, answer, session=session, segment=segment, consent=consent)
    content_key = blob_put(store, kept.trajectory.to_bytes()) if kept.trajectory else ""
    generated = answer.generated
    behaviour = behaviour_of(generated.text, answer.tool_calls, tokens=len(generated.token_ids))
    try:
        with transaction.atomic():
            generation = Generation.objects.create(
                id=answer.generation_id,
                lane=lane,
                arm=assignment.arm,
                release_id=assignment.release_id,
                canary_step=assignment.canary_step,
                outcome=answer.outcome,
                version=version,
                user_hash=user_hash(lane=lane, user_key=user_key),
                session=kept.session,
                segment=kept.segment,
                consent=kept.consent,
                content_key=content_key,
                sampling=_sampling_row(answer.sampling),
                trainable=kept.trainable,
                prompt_tokens=len(answer.prompt_token_ids),
                sampled_tokens=len(generated.token_ids),
                finish_reason=generated.finish_reason,
                latency_ms=answer.latency_ms,
                first_token_ms=answer.first_token_ms,
                prompt_hash=kept.prompt_hash,
                behaviour=behaviour if generated.token_ids else {},
            )
            generation_joined(generation=generation, version=version, project_id=lane.project_id)
    except DatabaseError:
        if content_key:  # nothing names it: it must not outlive an erasure
            with suppress(StoreError):
                store.delete(content_key)
        raise
    return generation


def _keep(lane: Lane, answer: Answer, *, session: str, segment: str, consent: Consent) -> _Kept:
    """Ask the lane's and the project's settings as they are now, not as they were when the request came."""
    terms = Lane.objects.values("project__consent", "record_share", "redactions").get(id=lane.id)
    allowed = narrowest(consent, terms["project__consent"])
    wanted = (
        allowed != Consent.NONE
        and bool(answer.generated.token_ids)
        and content_sampled(generation_id=answer.generation_id, share=terms["record_share"])
    )
    try:
        redactor = Redactor(terms["redactions"])
        session = redactor.text(session)[:SESSION_CHARACTERS]
        segment = redactor.text(segment)[:SEGMENT_CHARACTERS]
        redactor.count = 0
        trajectory = trajectory_redacted(trajectory_of(answer), redactor) if wanted else None
    except RedactionFailed as error:
        log.warning("content_not_kept", lane=lane.slug, generation=str(answer.generation_id), reason=str(error))
        return _Kept(consent=allowed)
    redacted = redactor.count > 0
    if allowed == Consent.NONE:
        return _Kept(consent=allowed, session=session, segment=segment)
    answered = answer.outcome == GenerationOutcome.ANSWERED
    return _Kept(
        # What was changed can be read and replayed, but nothing may be trained on it.
        consent=narrowest(allowed, Consent.EVAL) if redacted else allowed,
        session=session,
        segment=segment,
        trajectory=trajectory,
        prompt_hash="" if redacted else prompt_hash(lane=lane, prompt_token_ids=answer.prompt_token_ids),
        trainable=answer.sampling.trainable and answered and not redacted,
    )


def prompt_hash(*, lane: Lane, prompt_token_ids: list[int]) -> str:
    """Equal for equal prompts of the lane, and of no use without its salt."""
    tokens = b"".join(token.to_bytes(4, "little") for token in prompt_token_ids)
    return hmac.new(lane.salt.encode(), tokens, hashlib.sha256).hexdigest()


def _sampling_row(sampling: SamplingParams) -> dict[str, Any]:
    """How tokens were drawn. Stop strings are the user's text, and belong with the content alone."""
    row: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(sampling, stop=()))
    return row
