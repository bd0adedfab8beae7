"""Feedback that came before its generation: joined when that is written down, given up when nobody ever did."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import msgspec
from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q

from controlplane.models import Feedback, Generation, PolicyVersion, Project
from controlplane.services.events import CONDUCTOR, event_append, lane_topic, project_topic
from controlplane.services.intake import Target, map_content
from controlplane.services.signals import SignalMapContent
from controlplane.states import EventType, FeedbackState

# The answer's age is that at the feedback's arrival. Of an episode the newest turn is joined.
_FIND = """
SELECT DISTINCT ON (f.id) f.id, f.project_id, s.slug, g.id, g.lane_id, v.quarantined_at IS NOT NULL,
       extract(epoch FROM f.created_at - g.created_at)::float
FROM controlplane_feedback f
JOIN controlplane_signaldefinition s ON s.id = f.signal_id
JOIN controlplane_generation g ON {target}
JOIN controlplane_lane l ON l.id = g.lane_id AND l.project_id = f.project_id
JOIN controlplane_policyversion v ON v.id = g.version_id
WHERE f.state = 'pending' AND g.erased_at IS NULL
ORDER BY f.id, g.created_at DESC
LIMIT %(limit)s
"""
_TARGETS = (
    "g.id = CASE WHEN f.target_kind <> 'episode' THEN f.target_id::uuid END",
    "f.target_kind = 'episode' AND g.session <> '' AND g.session = f.target_id",
)
_JOIN = """
UPDATE controlplane_feedback f SET state = r.state, generation_id = r.generation_id
FROM jsonb_to_recordset(%(rows)s::jsonb) AS r(id uuid, state text, generation_id uuid)
WHERE f.id = r.id AND f.state = 'pending'
RETURNING f.id
"""
_ORPHAN = """
UPDATE controlplane_feedback f SET state = 'orphaned'
WHERE f.state = 'pending' AND f.created_at < now() - make_interval(secs => %(horizon_s)s)
RETURNING f.project_id
"""


def generation_joined(*, generation: Generation, version: PolicyVersion, project_id: uuid.UUID) -> int:
    """Join what waited for this generation, in the transaction that writes it down. Returns how many."""
    mine = Q(target_id=str(generation.id)) & ~Q(target_kind="episode")
    if generation.session:
        mine |= Q(target_kind="episode", target_id=generation.session)
    state = FeedbackState.QUARANTINED if version.quarantined_at else FeedbackState.JOINED
    waiting = Feedback.objects.filter(mine, project_id=project_id, state=FeedbackState.PENDING)
    joined = waiting.update(state=state, generation_id=generation.id)
    if joined:
        _announce(project_id, lane_topic(generation.lane_id), state, joined)
    return joined


@transaction.atomic
def feedback_sweep(*, limit: int = 2000) -> int:
    """Join pending feedback whose generation has arrived; give up on what waited past the horizon. Returns how many.

    What was written down while its feedback was on its way is found here: neither side saw the other.
    """
    moved = 0
    contents: dict[uuid.UUID, SignalMapContent | None] = {}
    for target in _TARGETS:
        found = _query(_FIND.format(target=target), {"limit": limit})
        rows, told = [], {}
        for feedback_id, project_id, slug, generation_id, lane_id, quarantined, age_s in found:
            if project_id not in contents:
                contents[project_id] = map_content(Project(pk=project_id))
            seen = Target(generation_id, lane_id, project_id, erased=False, quarantined=quarantined, age_s=age_s)
            state = seen.state_of(slug, contents[project_id])
            rows.append({"id": feedback_id, "state": state, "generation_id": generation_id})
            told[feedback_id] = (project_id, lane_topic(lane_id), state)
        joined = _query(_JOIN, {"rows": msgspec.json.encode(rows).decode()}) if rows else []
        for (project_id, topic, state), count in sorted(Counter(told[row[0]] for row in joined).items(), key=str):
            _announce(project_id, topic, state, count)
        moved += len(joined)
    orphans = _query(_ORPHAN, {"horizon_s": settings.FEEDBACK_HORIZON_S})
    for project_id, count in sorted(Counter(row[0] for row in orphans).items()):
        _announce(project_id, project_topic(project_id), FeedbackState.ORPHANED, count)
    return moved + len(orphans)


def _announce(project_id: uuid.UUID, topic: str, state: FeedbackState, count: int) -> None:
    event_append(
        project_id=project_id,
        topic=topic,
        event_type=EventType.FEEDBACK_CHANGED,
        actor=CONDUCTOR,
        data={"state": state.value, "count": count},
    )


def _query(sql: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows
