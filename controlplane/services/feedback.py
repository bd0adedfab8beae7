"""Feedback: received, checked, deduplicated, joined to the generation it is about, retracted."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import CharField, Exists, OuterRef
from django.db.models.functions import Cast, Now

from controlplane.errors import Conflict, ControlPlaneError, Gone, Invalid, NotFound, Throttled
from controlplane.models import (
    BatchItem,
    Feedback,
    FeedbackReceipt,
    FeedbackSource,
    Generation,
    PolicyVersion,
    Project,
    RejectedPayload,
    SignalDefinition,
)
from controlplane.services.events import Actor, event_append, lane_topic, project_topic
from controlplane.services.generations import narrowest
from controlplane.services.signals import signal_check
from controlplane.services.transitions import sources_of, transition
from controlplane.states import Consent, EventType, FeedbackState

MAX_BODY_BYTES = 64 * 1024
MAX_BATCH_BYTES = 1024 * 1024
MAX_BATCH_ITEMS = 500
REJECTED_BYTES = 8 * 1024
REJECTED_KEPT = 1000
CLOCK_SKEW = timedelta(minutes=5)


class FeedbackTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the feedback is about. `episode` is the session key, `message` the generation that wrote it."""

    kind: Literal["generation", "episode", "message"]
    id: str


class FeedbackActor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who gave it, as the sender hashes its users."""

    hash: str = ""
    kind: Literal["user", "expert", "system"] = "user"


class FeedbackPayload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of one feedback event."""

    event_id: uuid.UUID
    signal: str
    target: FeedbackTarget
    occurred_at: datetime
    value: bool | int | float | str | None = None
    actor: FeedbackActor = FeedbackActor()
    comment: str = ""
    demonstration: str | None = None
    tags: dict[str, str] = {}
    consent: Literal["train", "eval", "none"] = "none"
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of an event: 201 joined, 202 pending, 200 the same event again or a dry run."""

    status: int
    feedback_id: uuid.UUID | None
    join: str
    duplicate: bool = False

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {
            "id": str(self.feedback_id) if self.feedback_id else None,
            "join": self.join,
            "duplicate": self.duplicate,
        }


def payload_parse(data: Any) -> FeedbackPayload:
    """Check shape and bounds. Raises: Invalid, naming the field."""
    _refuse_unstorable(data)
    try:
        payload = msgspec.convert(data, type=FeedbackPayload)
    except msgspec.ValidationError as error:
        text = str(error)
        field = text.rsplit("`$.", 1)[1].rstrip("`") if "`$." in text else ""
        raise Invalid(f"the feedback is not valid: {text}", field=field) from error
    lengths = (
        ("target.id", payload.target.id, 1, 200),
        ("comment", payload.comment, 0, 10_000),
        ("demonstration", payload.demonstration or "", 0, 40_000),
        ("actor.hash", payload.actor.hash, 0, 64),
    )
    for field, text, low, high in lengths:
        if not low <= len(text) <= high:
            raise Invalid(f"{field} must have {low} to {high} characters, not {len(text)}", field=field)
    if payload.occurred_at.tzinfo is None:
        raise Invalid("occurred_at must carry its offset (RFC 3339)", field="occurred_at")
    if payload.occurred_at > datetime.now(UTC) + CLOCK_SKEW:
        raise Invalid("occurred_at lies in the future", field="occurred_at")
    if len(payload.tags) > 20 or any(len(key) + len(text) > 300 for key, text in payload.tags.items()):
        raise Invalid("at most 20 tags of at most 300 characters", field="tags")
    return payload


def _refuse_unstorable(data: Any) -> None:
    """PostgreSQL stores no NUL, and a lone surrogate is no text."""
    if isinstance(data, str):
        if "\x00" in data or any("\ud800" <= character <= "\udfff" for character in data):
            raise Invalid("the text has a NUL character or a lone surrogate")
    elif isinstance(data, dict):
        for key, value in data.items():
            _refuse_unstorable(key)
            _refuse_unstorable(value)
    elif isinstance(data, list):
        for value in data:
            _refuse_unstorable(value)


def feedback_receive(
    *, project: Project, sender: str, source: FeedbackSource | None, data: Any, actor: Actor
) -> Receipt:
    """Store one event exactly once, and join it to its generation, now or later.

    Raises: Invalid (422), NotFound (404: unknown signal, or a target of another project), Gone (410: the target was
    erased, or the source disabled), Conflict (409: the same event id with another body).
    """
    if source is not None and source.disabled_at is not None:
        raise Gone(f"source {source.slug} is disabled")
    payload = payload_parse(data)
    signal = SignalDefinition.objects.filter(project=project, slug=payload.signal).first()
    if signal is None:
        raise NotFound(f"no signal {payload.signal!r} is defined in this project", field="signal")
    signal_check(signal, payload.value)
    body_hash = hashlib.sha256(msgspec.json.encode(payload, order="deterministic")).hexdigest()
    known = _receipt(project=project, sender=sender, event_id=str(payload.event_id), body_hash=body_hash)
    if known is not None:
        return known
    generation = _target(project=project, payload=payload)
    if payload.dry_run:
        return Receipt(200, None, "joined" if generation else "pending")
    try:
        with transaction.atomic():
            return _store(
                project=project,
                sender=sender,
                source=source,
                signal=signal,
                payload=payload,
                body_hash=body_hash,
                generation=generation,
                actor=actor,
            )
    except IntegrityError:  # the same event came in twice at once, and the other one won
        raced = _receipt(project=project, sender=sender, event_id=str(payload.event_id), body_hash=body_hash)
        if raced is None:
            raise
        return raced


def _receipt(*, project: Project, sender: str, event_id: str, body_hash: str) -> Receipt | None:
    row = FeedbackReceipt.objects.filter(project=project, sender=sender, event_id=event_id).first()
    if row is None:
        return None
    if row.body_hash != body_hash:
        raise Conflict("this event_id was sent before with another body; use a new event_id", field="event_id")
    feedback = Feedback.objects.filter(id=row.feedback_id).first()
    return Receipt(200, row.feedback_id, feedback.state if feedback else "retracted", duplicate=True)


def _target(*, project: Project, payload: FeedbackPayload) -> Generation | None:
    """The generation, or None while it is not known. An episode is joined to its newest generation."""
    if payload.target.kind == "episode":
        rows = Generation.objects.filter(lane__project=project, session=payload.target.id)
        return rows.order_by("-created_at").first()
    try:
        wanted = uuid.UUID(payload.target.id.removeprefix("chatcmpl-"))
    except ValueError as error:
        raise Invalid("target.id of a generation is the id that its answer carried", field="target.id") from error
    row = Generation.objects.select_related("lane").filter(id=wanted).first()
    if row is None:
        return None
    if row.lane.project_id != project.id:
        raise NotFound("no such generation in this project", field="target.id")
    if row.erased_at is not None:
        raise Gone("the generation was erased at its user's wish", field="target.id")
    return row


def _store(
    *,
    project: Project,
    sender: str,
    source: FeedbackSource | None,
    signal: SignalDefinition,
    payload: FeedbackPayload,
    body_hash: str,
    generation: Generation | None,
    actor: Actor,
) -> Receipt:
    consent = narrowest(payload.consent, project.consent)
    keep_text = consent != Consent.NONE
    quarantined = generation is not None and generation.version.quarantined_at is not None
    joined = FeedbackState.QUARANTINED if quarantined else FeedbackState.JOINED
    target_id = payload.target.id.removeprefix("chatcmpl-")
    feedback = Feedback.objects.create(
        project=project,
        sender=sender,
        source=source,
        signal=signal,
        state=joined if generation else FeedbackState.PENDING,
        target_kind=payload.target.kind,
        target_id=str(uuid.UUID(target_id)) if payload.target.kind != "episode" else payload.target.id,
        generation_id=generation.id if generation else None,
        value=payload.value,
        occurred_at=payload.occurred_at,
        actor_hash=payload.actor.hash,
        actor_kind=payload.actor.kind,
        comment=payload.comment if keep_text else "",
        demonstration=(payload.demonstration or "") if keep_text else "",
        tags=payload.tags if keep_text else {},
        consent=consent,
    )
    FeedbackReceipt.objects.create(
        project=project, sender=sender, event_id=str(payload.event_id), body_hash=body_hash, feedback_id=feedback.id
    )
    event_append(
        project_id=project.id,
        topic=lane_topic(generation.lane_id) if generation else project_topic(project.id),
        event_type=EventType.FEEDBACK_RECEIVED,
        actor=actor,
        data={"feedback": str(feedback.id), "signal": signal.slug, "value": payload.value, "state": feedback.state},
    )
    return Receipt(201 if generation else 202, feedback.id, feedback.state)


def feedback_sweep(*, limit: int = 500) -> int:
    """Join pending feedback whose generation has arrived; give up on what waited past the horizon."""
    known = Generation.objects.annotate(text_id=Cast("id", CharField())).filter(text_id=OuterRef("target_id"))
    waiting = Feedback.objects.filter(state=FeedbackState.PENDING)
    moved = 0
    for row in waiting.exclude(target_kind="episode").filter(Exists(known))[:limit]:
        moved += Feedback.objects.filter(id=row.id, state=FeedbackState.PENDING).update(
            state=FeedbackState.JOINED, generation_id=uuid.UUID(row.target_id)
        )
    horizon = timedelta(seconds=settings.FEEDBACK_HORIZON_S)
    return moved + waiting.filter(created_at__lt=Now() - horizon).update(state=FeedbackState.ORPHANED)


@transaction.atomic
def feedback_retract(*, project: Project, feedback_id: uuid.UUID, actor: Actor, reason: str = "") -> list[str]:
    """Withdraw an event: a tombstone stays. Returns the versions that were trained on its generation.

    Raises: NotFound; Gone when it was retracted before.
    """
    row = Feedback.objects.filter(project=project, id=feedback_id).first()
    if row is None:
        raise NotFound("no such feedback in this project")
    if row.state == FeedbackState.RETRACTED:
        raise Gone("this feedback was retracted before")
    trained = _trained_on(row)
    transition(
        row,
        to=FeedbackState.RETRACTED,
        value=None,
        comment="",
        demonstration="",
        tags={},
    )
    event_append(
        project_id=project.id,
        topic=project_topic(project.id),
        event_type=EventType.FEEDBACK_CHANGED,
        actor=actor,
        reason=reason,
        data={"feedback": str(row.id), "state": row.state, "trained": trained},
    )
    return trained


def _trained_on(row: Feedback) -> list[str]:
    if row.generation_id is None:
        return []
    items = BatchItem.objects.filter(generation_id=row.generation_id).select_related("step__version")
    return [str(item.step.version) for item in items if item.step.version is not None]


def feedback_quarantine(*, version: PolicyVersion) -> int:
    """Set aside all feedback on what a bad version said, so that nothing is trained on it."""
    generations = Generation.objects.filter(version=version).values("id")
    return Feedback.objects.filter(
        generation_id__in=generations, state__in=sources_of(FeedbackState.QUARANTINED)
    ).update(state=FeedbackState.QUARANTINED)


def payload_reject(*, project: Project, sender: str, body: bytes, error: ControlPlaneError, actor: Actor) -> None:
    """Keep a refused payload of an authenticated sender, cut to a bound; the oldest make room."""
    if isinstance(error, Throttled):
        return
    text = body[:REJECTED_BYTES].decode("utf-8", "replace").replace("\x00", "\ufffd")
    with transaction.atomic():
        row = RejectedPayload.objects.create(
            project=project, sender=sender, body=text, code=error.code, detail=error.message[:1000]
        )
        rows = RejectedPayload.objects.filter(project=project).order_by("-created_at")
        surplus = list(rows.values_list("id", flat=True)[REJECTED_KEPT:])
        RejectedPayload.objects.filter(id__in=surplus).delete()
        event_append(
            project_id=project.id,
            topic=project_topic(project.id),
            event_type=EventType.PAYLOAD_REJECTED,
            actor=actor,
            data={"payload": str(row.id), "sender": sender, "code": error.code},
        )


def payload_text(data: Any) -> bytes:
    """A parsed body as it is kept for replay."""
    return json.dumps(data, ensure_ascii=True)[:REJECTED_BYTES].encode()


def payload_replay(*, row: RejectedPayload, actor: Actor) -> Receipt:
    """Send a kept payload through the full validation again. Raises: as feedback_receive."""
    source = FeedbackSource.objects.filter(project=row.project, slug=row.sender).first()
    try:
        data = json.loads(row.body)
    except ValueError as error:
        raise Invalid("the kept payload is not JSON, or was cut at its bound") from error
    receipt = feedback_receive(project=row.project, sender=row.sender, source=source, data=data, actor=actor)
    RejectedPayload.objects.filter(id=row.id).update(replayed_at=Now())
    return receipt
