"""Feedback is stored in sets: a batch costs the statements that one event costs.

`intake_store` is the only writer of receipts and of new feedback. One statement inserts the receipts, which decides
what is new, and the feedback of those alone; so an event is stored exactly once, however often and wherever at once
it is sent.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
import uuid_utils
from django.db import connection, transaction

from controlplane.models import Project
from controlplane.services.events import Actor, event_append, lane_topic, project_topic
from controlplane.services.signals import SignalMapContent, SignalShape
from controlplane.states import Consent, EventType, FeedbackState

# In the order of their ids, so that two batches with the same events cannot wait for each other in a circle. A receipt
# that is there already counts the repeat, and what was accepted under it is told.
_STORE = """
WITH given AS (
    SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS r(
        id uuid, event_id text, body_hash text, signal_id uuid, state text, target_kind text, target_id text,
        generation_id uuid, value jsonb, occurred_at timestamptz, actor_hash text, actor_kind text, comment text,
        demonstration text, tags jsonb, consent text)
), receipts AS (
    INSERT INTO controlplane_feedbackreceipt AS r
        (id, project_id, sender, event_id, body_hash, feedback_id, repeats)
    SELECT id, %(project)s, %(sender)s, event_id, body_hash, id, 0 FROM given ORDER BY event_id
    ON CONFLICT (project_id, sender, event_id) DO UPDATE SET repeats = r.repeats + 1
    RETURNING event_id, feedback_id, body_hash
), stored AS (
    INSERT INTO controlplane_feedback
        (id, project_id, sender, source_id, signal_id, state, target_kind, target_id, generation_id, value,
         occurred_at, actor_hash, actor_kind, comment, demonstration, tags, consent)
    SELECT g.id, %(project)s, %(sender)s, %(source)s, g.signal_id, g.state, g.target_kind, g.target_id,
           g.generation_id, g.value, g.occurred_at, g.actor_hash, g.actor_kind, g.comment, g.demonstration, g.tags,
           g.consent
    FROM given g JOIN receipts r ON r.feedback_id = g.id
)
SELECT event_id, feedback_id::text, body_hash FROM receipts
WHERE NOT EXISTS (SELECT FROM given g WHERE g.id = receipts.feedback_id)
"""
_GENERATIONS = """
SELECT g.id::text, g.id, g.lane_id, l.project_id, g.erased_at IS NOT NULL, v.quarantined_at IS NOT NULL,
       extract(epoch FROM now() - g.created_at)::float
FROM controlplane_generation g
JOIN controlplane_lane l ON l.id = g.lane_id
JOIN controlplane_policyversion v ON v.id = g.version_id
WHERE g.id = ANY(%(ids)s::uuid[])
"""
_EPISODES = """
SELECT DISTINCT ON (g.session) g.session, g.id, g.lane_id, l.project_id, false, v.quarantined_at IS NOT NULL,
       extract(epoch FROM now() - g.created_at)::float
FROM controlplane_generation g
JOIN controlplane_lane l ON l.id = g.lane_id
JOIN controlplane_policyversion v ON v.id = g.version_id
WHERE l.project_id = %(project)s AND g.session = ANY(%(sessions)s) AND g.erased_at IS NULL
ORDER BY g.session, g.created_at DESC
"""


class Target(msgspec.Struct, frozen=True):
    """The generation that feedback is about; of an episode, its newest."""

    generation_id: uuid.UUID
    lane_id: uuid.UUID
    project_id: uuid.UUID
    erased: bool
    quarantined: bool
    age_s: float

    def state_of(self, slug: str, content: SignalMapContent | None) -> FeedbackState:
        """The state of feedback that arrives now."""
        if self.quarantined:
            return FeedbackState.QUARANTINED
        horizon_s = content.horizon_of(slug) if content else 0.0
        return FeedbackState.LATE if 0 < horizon_s < self.age_s else FeedbackState.JOINED


class Row(msgspec.Struct, kw_only=True):
    """One event on its way into the table."""

    id: str = msgspec.field(default_factory=lambda: str(uuid_utils.uuid7()))
    event_id: str
    body_hash: str
    signal_id: uuid.UUID
    signal: str
    state: FeedbackState
    target_kind: str
    target_id: str
    generation_id: uuid.UUID | None
    lane_id: uuid.UUID | None
    value: Any
    occurred_at: datetime
    actor_hash: str
    actor_kind: str
    comment: str
    demonstration: str
    tags: dict[str, str]
    consent: Consent


class Stored(msgspec.Struct, frozen=True):
    """What stands under an event id now. `fresh`: it was stored just now."""

    feedback_id: str
    body_hash: str
    fresh: bool


def intake_store(
    *, project: Project, sender: str, source_id: uuid.UUID | None, rows: Sequence[Row], actor: Actor
) -> dict[str, Stored]:
    """Store what is new of the rows, whose event ids differ, in one transaction with one event for each topic."""
    parameters: dict[str, Any] = {
        "project": project.pk,
        "sender": sender,
        "source": source_id,
        "rows": msgspec.json.encode(rows).decode(),
    }
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_STORE, parameters)
            answers = cursor.fetchall()
        known = {event_id: Stored(key, body_hash, fresh=False) for event_id, key, body_hash in answers}
        _announce(project, [row for row in rows if row.event_id not in known], actor)
    return {row.event_id: Stored(row.id, row.body_hash, fresh=True) for row in rows} | known


def _announce(project: Project, rows: Iterable[Row], actor: Actor) -> None:
    """One event for each lane, and one of the project for what waits for its target. Topics are locked in order."""
    by_topic: dict[str, list[Row]] = {}
    for row in rows:
        topic = lane_topic(row.lane_id) if row.lane_id else project_topic(project.pk)
        by_topic.setdefault(topic, []).append(row)
    for topic, some in sorted(by_topic.items()):
        event_append(
            project_id=project.pk,
            topic=topic,
            event_type=EventType.FEEDBACK_RECEIVED,
            actor=actor,
            data=_told(some),
        )


def _told(rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0]
    if len(rows) == 1:
        return {"feedback": str(first.id), "signal": first.signal, "value": first.value, "state": first.state}
    states, signals = Counter(row.state.value for row in rows), Counter(row.signal for row in rows)
    return {"count": len(rows), "states": dict(states), "signals": dict(signals)}


def targets_find(*, project: Project, ids: Iterable[str], sessions: Iterable[str]) -> dict[str, Target]:
    """Targets by generation id (a UUID as text) or session; generations of other projects too: see `project_id`."""
    wanted, episodes = "{" + ",".join(ids) + "}", list(sessions)
    rows: list[tuple[Any, ...]] = []
    with connection.cursor() as cursor:
        if wanted != "{}":
            cursor.execute(_GENERATIONS, {"ids": wanted})
            rows += cursor.fetchall()
        if episodes:
            cursor.execute(_EPISODES, {"project": project.pk, "sessions": episodes})
            rows += cursor.fetchall()
    return {name: Target(*rest) for name, *rest in rows}


_RULES = """
SELECT (SELECT json_agg(s)::text FROM controlplane_signaldefinition s
        WHERE s.project_id = %(project)s AND s.slug = ANY(%(slugs)s)),
       (SELECT content::text FROM controlplane_signalmap m
        WHERE m.project_id = %(project)s ORDER BY number DESC LIMIT 1),
       (SELECT jsonb_agg(redactions)::text FROM controlplane_lane l
        WHERE l.project_id = %(project)s AND redactions <> '{}')
"""


class IntakeRules(msgspec.Struct, frozen=True):
    """What a project has to say of events: its signals by name, its map, what its lanes redact."""

    signals: dict[str, SignalShape]
    content: SignalMapContent | None
    redactions: list[dict[str, str]]


def rules_find(*, project: Project, slugs: Iterable[str]) -> IntakeRules:
    """The project's rules, and its signals of these names, in one query."""
    with connection.cursor() as cursor:
        cursor.execute(_RULES, {"project": project.pk, "slugs": list(slugs)})
        signals, content, redactions = cursor.fetchone()
    return IntakeRules(
        {row.slug: row for row in msgspec.json.decode(signals, type=list[SignalShape])} if signals else {},
        msgspec.json.decode(content, type=SignalMapContent) if content else None,
        msgspec.json.decode(redactions) if redactions else [],
    )


def map_content(project: Project) -> SignalMapContent | None:
    """The newest published map of the project, if there is one."""
    return rules_find(project=project, slugs=()).content
