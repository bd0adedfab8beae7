"""Rows, bodies and the bare way in, for the benchmark of ingestion. Needs Django set up."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg

from controlplane.models import Feedback, FeedbackReceipt, Generation, Lane, Project
from controlplane.models.base import new_id
from controlplane.services.catalog import model_register
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import cluster_create
from controlplane.services.lanes import lane_create
from controlplane.services.signals import signal_define, signal_map_publish
from controlplane.services.sources import source_create, source_key_create
from controlplane.services.tenancy import project_create
from controlplane.states import Consent, SignalType
from rl_core.types import ClusterRole, FinishReason

ACTORS = 200
UNLIMITED = 100_000_000
_slugs = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Intake:
    """Where events go, and what they are about."""

    project: Project
    sender: str
    source_id: uuid.UUID
    key: str
    signal_id: uuid.UUID
    generations: list[uuid.UUID]


def intake(*, generations: int) -> Intake:
    """A project with a lane that answered so often, a signal, a map, and a source with a key."""
    name = f"ingest-{next(_slugs)}"
    project = project_create(slug=name, name=name, actor=SYSTEM)
    model = model_register(
        project=project,
        slug="tiny",
        folder="/nowhere",
        root="a" * 64,
        manifest_key="snapshots/a/manifest.json",
        full_bytes=1,
        parameters=1,
        architecture="none",
        actor=SYSTEM,
    )
    cluster = cluster_create(
        project=project, slug="serving", role=ClusterRole.SERVING, region="local", capacity=1, actor=SYSTEM, model=model
    )
    lane = lane_create(project=project, slug="assistant", cluster=cluster, model=model, actor=SYSTEM)
    signal = signal_define(project=project, slug="kept", value_type=SignalType.NUMBER, minimum=0, maximum=1)
    rules = {"signals": {"kept": {"low": -1, "high": 1}}, "horizon_s": 7200}
    signal_map_publish(project=project, content=rules, author=None, actor=SYSTEM)
    source, _ = source_create(
        project=project,
        slug=name,
        actor=SYSTEM,
        rate_per_minute=UNLIMITED,
        actor_rate_per_minute=UNLIMITED,
    )
    _, key = source_key_create(source=source, name="bench", actor=SYSTEM, created_by=None)
    return Intake(project, source.slug, source.pk, key, signal.pk, _answers(lane, generations))


def _answers(lane: Lane, count: int) -> list[uuid.UUID]:
    lane.refresh_from_db()
    rows = Generation.objects.bulk_create(
        (
            Generation(
                lane=lane,
                version=lane.promoted_version,
                user_hash=f"{number % ACTORS:064x}",
                consent=Consent.TRAIN,
                prompt_tokens=100,
                sampled_tokens=50,
                finish_reason=FinishReason.STOP,
                latency_ms=10.0,
            )
            for number in range(count)
        ),
        batch_size=1000,
    )
    return [row.id for row in rows]


def events(into: Intake, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Fresh events about answers that are there."""
    drawn = random.Random(seed)
    return [
        {
            "event_id": str(uuid.uuid4()),
            "signal": "kept",
            "target": {"kind": "generation", "id": str(drawn.choice(into.generations))},
            "value": round(drawn.random(), 3),
            "occurred_at": datetime.now(UTC).isoformat(),
            "actor": {"hash": f"{drawn.randrange(ACTORS):032x}", "kind": "user"},
            "comment": "The edit stayed, mostly; I changed a name and the order of two lines.",
            "tags": {"plan": "team", "client": "ide"},
            "consent": "train",
        }
        for _ in range(count)
    ]


def stored(into: Intake) -> tuple[int, int]:
    """Receipts and feedback of the project in the database."""
    receipts = FeedbackReceipt.objects.filter(project=into.project).count()
    return receipts, Feedback.objects.filter(project=into.project).count()


_RECEIPT = (
    "INSERT INTO controlplane_feedbackreceipt (id, project_id, sender, event_id, body_hash, feedback_id, repeats) "
    "{values} ON CONFLICT (project_id, sender, event_id) DO NOTHING"
)
_FEEDBACK = (
    "INSERT INTO controlplane_feedback (id, project_id, sender, source_id, signal_id, state, target_kind, target_id, "
    "generation_id, value, occurred_at, actor_hash, actor_kind, comment, demonstration, tags, consent) "
    "{values} ON CONFLICT DO NOTHING"
)
_RECEIPT_TYPES = ("uuid", "uuid", "text", "text", "text", "uuid", "int")
_FEEDBACK_TYPES = (
    *("uuid", "uuid", "text", "uuid", "uuid", "text", "text", "text", "uuid", "jsonb", "timestamptz"),
    *("text", "text", "text", "text", "jsonb", "text"),
)
Rows = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]


def bare_rows(into: Intake, batch: list[dict[str, Any]]) -> Rows:
    """What the endpoint makes of the events: the rows of both tables, ready to be inserted."""
    receipts, feedback = [], []
    for event in batch:
        key, generation = new_id(), uuid.UUID(event["target"]["id"])
        digest = hashlib.sha256(json.dumps(event).encode()).hexdigest()
        at = datetime.fromisoformat(event["occurred_at"])
        value, tags, actor = json.dumps(event["value"]), json.dumps(event["tags"]), event["actor"]
        receipts.append((key, into.project.pk, into.sender, event["event_id"], digest, key, 0))
        feedback.append(
            (
                *(key, into.project.pk, into.sender, into.source_id, into.signal_id, "joined", "generation"),
                *(str(generation), generation, value, at, actor["hash"], actor["kind"], event["comment"], "", tags),
                "train",
            )
        )
    return receipts, feedback


def bare_executemany(connection: psycopg.Connection[Any], rows: Rows) -> None:
    """Insert them as psycopg does many: pipelined, and one commit."""
    with connection.cursor() as cursor:
        for sql, types, some in ((_RECEIPT, _RECEIPT_TYPES, rows[0]), (_FEEDBACK, _FEEDBACK_TYPES, rows[1])):
            places = ", ".join(f"%s::{kind}" for kind in types)
            cursor.executemany(sql.format(values=f"VALUES ({places})"), some)
    connection.commit()


def bare_unnest(connection: psycopg.Connection[Any], rows: Rows) -> None:
    """Insert them by one statement a table over arrays, and one commit."""
    for sql, types, some in ((_RECEIPT, _RECEIPT_TYPES, rows[0]), (_FEEDBACK, _FEEDBACK_TYPES, rows[1])):
        columns = [list(column) for column in zip(*some, strict=True)]
        arrays = ", ".join(f"%s::{kind}[]" for kind in types)
        connection.execute(sql.format(values=f"SELECT * FROM unnest({arrays})"), columns)  # noqa: S608  # our own names
    connection.commit()
