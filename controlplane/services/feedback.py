"""Feedback: received, checked, deduplicated, joined to the generation it is about, retracted."""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from django.db import DataError

from controlplane.errors import Conflict, ControlPlaneError, Gone, Invalid, NotFound, Throttled
from controlplane.models import Feedback, FeedbackReceipt, FeedbackSource, Project, SignalDefinition
from controlplane.models.feedback import ACTOR_RATE_PER_MINUTE, RATE_PER_MINUTE
from controlplane.services.comments import Texts
from controlplane.services.events import Actor
from controlplane.services.generations import narrowest
from controlplane.services.intake import Row, Stored, Target, intake_store, map_content, targets_find
from controlplane.services.limits import Take, limits_take
from controlplane.services.payloads import FeedbackPayload, payload_parse
from controlplane.services.signals import SignalMapContent, signal_check
from controlplane.states import FeedbackState

_PAYLOAD = msgspec.json.Decoder(FeedbackPayload)


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends: events are deduplicated and limited within a sender. A source lends its name, trust and limits."""

    project: Project
    name: str
    actor: Actor
    source: FeedbackSource | None = None


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


Outcome = Receipt | ControlPlaneError
Parse = Callable[[Any], FeedbackPayload]


def feedback_parse(data: Any) -> FeedbackPayload:
    """One event of feedback, from its bytes or from parsed JSON. Raises: Malformed, Invalid."""
    return payload_parse(data, _PAYLOAD)


def feedback_receive(
    *, project: Project, sender: str, source: FeedbackSource | None, data: Any, actor: Actor
) -> Receipt:
    """Store one event exactly once, and join it to its generation, now or later. `data`: its bytes, or parsed JSON.

    Raises: Malformed (400), Invalid (422), NotFound (404: unknown signal, or a target of another project), Gone (410:
    the target was erased, or the source disabled), Conflict (409: the same event id, another body), Throttled (429).
    """
    [outcome] = feedback_receive_many(sender=Sender(project, sender, actor, source), items=[data])
    if isinstance(outcome, ControlPlaneError):
        raise outcome
    return outcome


def feedback_receive_many(
    *, sender: Sender, items: Sequence[Any], parse: Parse = feedback_parse, limited: bool = True
) -> list[Outcome]:
    """`feedback_receive` of many: each has an outcome of its own, and all that is new is committed together.

    Raises: Gone when the source is disabled; Throttled when the sender's limit lets not one event through.
    """
    if sender.source is not None and sender.source.disabled_at is not None:
        raise Gone(f"source {sender.source.slug} is disabled")
    entries = [_entry(item, parse) for item in items]
    if limited:
        _limit(sender, entries)
    _know_signals(sender.project, _open(entries))
    _find_targets(sender.project, _open(entries))
    _look_back(sender, [entry for entry in entries if entry.payload is not None and (entry.refusal or entry.dry)])
    _store(sender, _open(entries))
    return [entry.outcome() for entry in entries]


@dataclass(slots=True)
class _Entry:
    """One item on its way. `refusal` is an error that a receipt of the same event would overrule."""

    payload: FeedbackPayload | None = None
    signal: SignalDefinition | None = None
    target: Target | None = None
    refusal: ControlPlaneError | None = None
    error: ControlPlaneError | None = None
    receipt: Receipt | None = None
    body_hash: str = ""
    target_id: str = ""

    @property
    def event_id(self) -> str:
        assert self.payload is not None
        return str(self.payload.event_id)

    @property
    def dry(self) -> bool:
        return self.payload is not None and self.payload.dry_run

    @property
    def state(self) -> str:
        return "joined" if self.target else "pending"

    def settle(self, stored: Stored, state: str) -> None:
        """Its outcome by what stands under its event id."""
        if stored.body_hash != self.body_hash:
            self.error = Conflict("this event_id was sent before with another body; use a new event_id", "event_id")
        elif stored.fresh:
            self.receipt = Receipt(202 if state == FeedbackState.PENDING else 201, stored.feedback_id, state)
        else:
            self.receipt = Receipt(200, stored.feedback_id, state, duplicate=True)

    def outcome(self) -> Outcome:
        """What is answered."""
        found = self.error or self.receipt or self.refusal
        assert found is not None
        return found


def _entry(item: Any, parse: Parse) -> _Entry:
    try:
        payload = parse(item)
    except ControlPlaneError as error:
        return _Entry(error=error)
    digest = hashlib.sha256(msgspec.json.encode(payload, order="deterministic")).hexdigest()
    return _Entry(payload=payload, body_hash=digest)


def _open(entries: Iterable[_Entry]) -> list[_Entry]:
    """Those that have no outcome yet."""
    return [entry for entry in entries if not (entry.error or entry.receipt or entry.refusal)]


def _limit(sender: Sender, entries: Sequence[_Entry]) -> None:
    """Ask the sender's bucket and those of its actors, at once. Raises: Throttled when nothing gets through."""
    source, project = sender.source, sender.project
    by_actor = Counter(entry.payload.actor.hash for entry in entries if entry.payload and entry.payload.actor.hash)
    per_minute = source.rate_per_minute if source else RATE_PER_MINUTE
    per_actor = source.actor_rate_per_minute if source else ACTOR_RATE_PER_MINUTE
    takes = [Take(f"{project.pk}:{sender.name}", len(entries), per_minute)]
    takes += [Take(f"{project.pk}:{sender.name}:{who}", count, per_actor) for who, count in by_actor.items()]
    whole, *grants = limits_take(takes)
    if whole.events == 0:
        raise Throttled(f"this sender has used up its {per_minute} events a minute", wait=whole.wait_s)
    for entry in entries[whole.events :]:
        entry.error = Throttled(f"this sender has used up its {per_minute} events a minute", wait=whole.wait_s)
    left = {who: grant.events for who, grant in zip(by_actor, grants, strict=True)}
    waits = {who: grant.wait_s for who, grant in zip(by_actor, grants, strict=True)}
    for entry in _open(entries):
        who = entry.payload.actor.hash if entry.payload else ""
        if who and left[who] == 0:
            entry.error = Throttled(f"this actor has used up its {per_actor} events a minute", wait=waits[who])
        elif who:
            left[who] -= 1


def _know_signals(project: Project, entries: Sequence[_Entry]) -> None:
    slugs = {entry.payload.signal for entry in entries if entry.payload}
    known = {row.slug: row for row in SignalDefinition.objects.filter(project=project, slug__in=slugs)} if slugs else {}
    for entry in entries:
        assert entry.payload is not None
        entry.signal = known.get(entry.payload.signal)
        if entry.signal is None:
            slug = entry.payload.signal
            entry.error = NotFound(f"no signal {slug!r} is defined in this project", field="signal")
            continue
        try:
            signal_check(entry.signal, entry.payload.value)
        except Invalid as error:
            entry.error = error


def _find_targets(project: Project, entries: Sequence[_Entry]) -> None:
    """One query for all. An episode is joined to its newest generation."""
    ids: set[uuid.UUID] = set()
    sessions: set[str] = set()
    for entry in entries:
        assert entry.payload is not None
        target = entry.payload.target
        if target.kind == "episode":
            entry.target_id = target.id
            sessions.add(target.id)
            continue
        try:
            key = uuid.UUID(target.id.removeprefix("chatcmpl-"))
        except ValueError:
            entry.error = Invalid("target.id of a generation is the id that its answer carried", field="target.id")
            continue
        entry.target_id = str(key)
        ids.add(key)
    found = targets_find(project=project, ids=ids, sessions=sessions)
    for entry in _open(entries):
        entry.target = found.get(entry.target_id)
        if entry.target is not None and entry.target.project_id != project.pk:
            entry.refusal = NotFound("no such generation in this project", field="target.id")
        elif entry.target is not None and entry.target.erased:
            entry.refusal = Gone("the generation was erased at its user's wish", field="target.id")


def _look_back(sender: Sender, entries: Sequence[_Entry]) -> None:
    """Dry runs, and events whose target is gone meanwhile, may have been accepted before."""
    if not entries:
        return
    rows = FeedbackReceipt.objects.filter(project=sender.project, sender=sender.name)
    receipts = {row.event_id: row for row in rows.filter(event_id__in=[entry.event_id for entry in entries])}
    states = _states(row.feedback_id for row in receipts.values())
    for entry in entries:
        if entry.error is not None:
            continue
        row = receipts.get(entry.event_id)
        if row is not None:
            entry.settle(Stored(row.feedback_id, row.body_hash, fresh=False), states.get(row.feedback_id, "retracted"))
        elif entry.refusal is None:
            entry.receipt = Receipt(200, None, entry.state)


def _store(sender: Sender, entries: Sequence[_Entry]) -> None:
    """Write what is left, together. The same event twice in one batch is one event."""
    if not entries:
        return
    content = map_content(sender.project)
    texts = Texts(sender.project, [entry.payload for entry in entries if entry.payload])
    first = {entry.event_id: entry for entry in reversed(entries)}
    rows = {event_id: _row(sender.project, entry, content, texts) for event_id, entry in first.items()}
    stored = _stored(sender, list(rows.values()))
    states = _states(found.feedback_id for found in stored.values() if isinstance(found, Stored) and not found.fresh)
    for entry in entries:
        found = stored[entry.event_id]
        if isinstance(found, ControlPlaneError):
            entry.error = found
        elif found.fresh:
            mine = Stored(found.feedback_id, found.body_hash, fresh=entry is first[entry.event_id])
            entry.settle(mine, rows[entry.event_id].state.value)
        else:
            entry.settle(found, states.get(found.feedback_id, FeedbackState.RETRACTED))


def _stored(sender: Sender, rows: list[Row]) -> dict[str, Stored | ControlPlaneError]:
    """In one transaction; where the database cannot hold that, row by row, so that one cannot spoil the others."""
    source_id = sender.source.pk if sender.source else None
    try:
        return dict(
            intake_store(project=sender.project, sender=sender.name, source_id=source_id, rows=rows, actor=sender.actor)
        )
    except DataError as error:
        if len(rows) == 1:
            return {rows[0].event_id: Invalid(f"the event cannot be stored: {str(error)[:200]}")}
        return {event_id: found for row in rows for event_id, found in _stored(sender, [row]).items()}


def _row(project: Project, entry: _Entry, content: SignalMapContent | None, texts: Texts) -> Row:
    payload, signal, target = entry.payload, entry.signal, entry.target
    assert payload is not None
    assert signal is not None
    consent = narrowest(payload.consent, project.consent)
    kept = texts.kept(payload, consent)
    return Row(
        event_id=entry.event_id,
        body_hash=entry.body_hash,
        signal_id=signal.pk,
        signal=signal.slug,
        state=target.state_of(signal.slug, content) if target else FeedbackState.PENDING,
        target_kind=payload.target.kind,
        target_id=entry.target_id,
        generation_id=target.generation_id if target else None,
        lane_id=target.lane_id if target else None,
        value=payload.value,
        occurred_at=payload.occurred_at,
        actor_hash=payload.actor.hash,
        actor_kind=payload.actor.kind,
        comment=kept.comment,
        demonstration=kept.demonstration,
        tags=kept.tags,
        consent=consent.value,
    )


def _states(ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, str]:
    wanted = list(ids)
    return dict(Feedback.objects.filter(id__in=wanted).values_list("id", "state")) if wanted else {}
