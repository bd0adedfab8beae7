"""The event log: every change appends one record, gapless within its topic."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction

from controlplane.errors import Invalid
from controlplane.services.nudges import topic_nudge
from controlplane.states import ActorKind, EventType

# The topic's row is locked by the first half until the commit; the second writes the event under its number.
_APPEND = """
WITH topic AS (
    INSERT INTO controlplane_topic AS t (name, project_id, seq) VALUES (%(topic)s, %(project)s, 1)
    ON CONFLICT (name) DO UPDATE SET seq = t.seq + 1 RETURNING name, seq
)
INSERT INTO controlplane_event (project_id, topic, seq, type, actor_kind, actor, reason, data)
SELECT %(project)s, name, seq, %(type)s, %(actor_kind)s, %(actor)s, %(reason)s, %(data)s::jsonb FROM topic
RETURNING seq
"""
NUDGE_CHANNEL = "slipway_nudge"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who causes a change."""

    kind: ActorKind
    name: str


CONDUCTOR = Actor(ActorKind.CONDUCTOR, "conductor")
SYSTEM = Actor(ActorKind.SYSTEM, "system")


def require_reason(reason: str, message: str) -> None:
    """A change that people must be able to account for has a reason. Raises: Invalid, with what to say."""
    if not reason.strip():
        raise Invalid(message, field="reason")


def run_topic(run_id: uuid.UUID) -> str:
    """Topic of one run: its stages, groups, rollouts, steps, versions, metrics."""
    return f"run:{run_id}"


def project_topic(project_id: uuid.UUID) -> str:
    """Topic of one project: catalogue, people, clusters, replicas, transfers."""
    return f"project:{project_id}"


def lane_topic(lane_id: uuid.UUID) -> str:
    """Topic of one lane: releases, feedback."""
    return f"lane:{lane_id}"


def event_append(
    *,
    project_id: uuid.UUID,
    topic: str,
    event_type: EventType,
    actor: Actor,
    data: dict[str, Any],
    reason: str = "",
) -> int:
    """Append one event in the caller's transaction, and nudge subscribers when it commits. Returns its `seq`.

    `seq` is assigned under a lock on the topic's row, held until the commit: a subscriber that sees `seq` n has, or
    can fetch, every event before it. A rolled-back transaction leaves no gap.

    Raises: RuntimeError outside a transaction.
    """
    if not connection.in_atomic_block:
        raise RuntimeError("event_append needs the transaction of the change that it records")
    parameters: dict[str, Any] = {
        "topic": topic,
        "project": project_id,
        "type": event_type,
        "actor_kind": actor.kind,
        "actor": actor.name[:200],
        "reason": reason[:500],
        "data": json.dumps(data),
    }
    with connection.cursor() as cursor:
        cursor.execute(_APPEND, parameters)
        seq: int = cursor.fetchone()[0]
    transaction.on_commit(lambda: topic_nudge(topic, seq), robust=True)
    return seq


def conductor_nudge() -> None:
    """Wake the conductor when the current transaction commits; PostgreSQL delivers NOTIFY at commit alone."""
    with connection.cursor() as cursor:
        cursor.execute(f"NOTIFY {NUDGE_CHANNEL}")
