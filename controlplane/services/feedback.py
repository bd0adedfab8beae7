"""Feedback: received, checked, deduplicated, joined to the generation it is about, retracted."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from django.db import DataError

from controlplane.errors import ControlPlaneError, Gone, Invalid, NotFound, Throttled
from controlplane.models import Feedback, FeedbackReceipt, FeedbackSource, Project
from controlplane.models.feedback import ACTOR_RATE_PER_MINUTE, RATE_PER_MINUTE
from controlplane.services.comments import Texts
from controlplane.services.entries import Entry, Outcome, Receipt, Sender
from controlplane.services.events import Actor
from controlplane.services.generations import narrowest
from controlplane.services.intake import IntakeRules, Row, Stored, intake_store, rules_find, targets_find
from controlplane.services.limits import Take, limits_take
from controlplane.services.payloads import FeedbackPayload, payload_parse
from controlplane.services.signals import signal_check
from controlplane.states import Consent, FeedbackState

_PAYLOAD = msgspec.json.Decoder(FeedbackPayload)
_CANONICAL = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


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
    rules = _know_signals(sender.project, _open(entries))
    _find_targets(sender.project, _open(entries))
    _look_back(sender, [entry for entry in entries if entry.payload is not None and (entry.refusal or entry.dry)])
    _store(sender, _open(entries), rules)
    return [entry.outcome() for entry in entries]


def _entry(item: Any, parse: Parse) -> Entry:
    try:
        payload = parse(item)
    except ControlPlaneError as error:
        return Entry(error=error)
    digest = hashlib.sha256(msgspec.json.encode(payload, order="deterministic")).hexdigest()
    return Entry(payload, str(payload.event_id), digest)


def _open(entries: Iterable[Entry]) -> list[Entry]:
    """Those that have no outcome yet."""
    return [entry for entry in entries if not (entry.error or entry.receipt or entry.refusal)]


def _limit(sender: Sender, entries: Sequence[Entry]) -> None:
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


def _know_signals(project: Project, entries: Sequence[Entry]) -> IntakeRules:
    rules = rules_find(project=project, slugs={entry.payload.signal for entry in entries if entry.payload})
    for entry in entries:
        assert entry.payload is not None
        slug = entry.payload.signal
        entry.signal = rules.signals.get(slug)
        if entry.signal is None:
            entry.error = NotFound(f"no signal {slug!r} is defined in this project", field="signal")
            continue
        try:
            signal_check(entry.signal, entry.payload.value)
        except Invalid as error:
            entry.error = error
    return rules


def _find_targets(project: Project, entries: Sequence[Entry]) -> None:
    """One query for all. An episode is joined to its newest generation."""
    ids: set[str] = set()
    sessions: set[str] = set()
    for entry in entries:
        assert entry.payload is not None
        target = entry.payload.target
        if target.kind == "episode":
            entry.target_id = target.id
            sessions.add(target.id)
            continue
        name = target.id.removeprefix("chatcmpl-")
        try:
            entry.target_id = name if _CANONICAL(name) else str(uuid.UUID(name))
        except ValueError:
            entry.error = Invalid("target.id of a generation is the id that its answer carried", field="target.id")
            continue
        ids.add(entry.target_id)
    found = targets_find(project=project, ids=ids, sessions=sessions)
    for entry in _open(entries):
        entry.target = found.get(entry.target_id)
        if entry.target is not None and entry.target.project_id != project.pk:
            entry.refusal = NotFound("no such generation in this project", field="target.id")
        elif entry.target is not None and entry.target.erased:
            entry.refusal = Gone("the generation was erased at its user's wish", field="target.id")


def _look_back(sender: Sender, entries: Sequence[Entry]) -> None:
    """Dry runs, and events whose target is gone meanwhile, may have been accepted before."""
    if not entries:
        return
    rows = FeedbackReceipt.objects.filter(project=sender.project, sender=sender.name)
    found = {
        row.event_id: Stored(str(row.feedback_id), row.body_hash, fresh=False)
        for row in rows.filter(event_id__in=[entry.event_id for entry in entries])
    }
    states = _states(stored.feedback_id for stored in found.values())
    for entry in entries:
        if entry.error is not None:
            continue
        stored = found.get(entry.event_id)
        if stored is not None:
            entry.settle(stored, states.get(stored.feedback_id, FeedbackState.RETRACTED))
        elif entry.refusal is None:
            entry.receipt = Receipt(entry.event_id, 200, None, entry.state)


def _store(sender: Sender, entries: Sequence[Entry], rules: IntakeRules) -> None:
    """Write what is left, together. The same event twice in one batch is one event."""
    if not entries:
        return
    texts, consents = (
        Texts(rules.redactions),
        {name: narrowest(name, sender.project.consent) for name in Consent.values},
    )
    first = {entry.event_id: entry for entry in reversed(entries)}
    rows = {event_id: _row(entry, rules, texts, consents) for event_id, entry in first.items()}
    stored = _stored(sender, list(rows.values()))
    states = _states(found.feedback_id for found in stored.values() if isinstance(found, Stored) and not found.fresh)
    for entry in entries:
        found = stored[entry.event_id]
        if isinstance(found, ControlPlaneError):
            entry.error = found
        elif found.fresh:
            mine = Stored(found.feedback_id, found.body_hash, fresh=entry is first[entry.event_id])
            entry.settle(mine, rows[entry.event_id].state)
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


def _row(entry: Entry, rules: IntakeRules, texts: Texts, consents: Mapping[str, Consent]) -> Row:
    """The event as it is written down."""
    payload, signal, target = entry.payload, entry.signal, entry.target
    assert payload is not None
    assert signal is not None
    consent = consents[payload.consent]
    kept = texts.kept(payload, consent)
    return Row(
        event_id=entry.event_id,
        body_hash=entry.body_hash,
        signal_id=signal.id,
        signal=signal.slug,
        state=target.state_of(signal.slug, rules.content) if target else FeedbackState.PENDING,
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
        consent=consent,
    )


def _states(ids: Iterable[str]) -> dict[str, str]:
    wanted = list(ids)
    rows = Feedback.objects.filter(id__in=wanted).values_list("id", "state") if wanted else []
    return {str(key): state for key, state in rows}
