"""Which feedback speaks of which generation: what was given on it, and the outcomes of its episode.

An episode is the turns of one user in one session of one lane. Its outcome is credited to every turn that was over when
it occurred; the map's `episode_discount` says how much less with each turn between. Windows, canaries and monitors all
read it here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from django.db import connection

from controlplane.models import Feedback, Generation

EVERYTHING = "true"
# The sender's clock is believed up to the outcome's arrival. What came before its generation is about that.
_CREDIT = """
SELECT g.id AS generation_id, g.created_at AS answered_at, 0 AS distance, FEEDBACK
FROM controlplane_generation g JOIN controlplane_feedback f ON f.generation_id = g.id
WHERE f.state = 'joined' AND f.target_kind <> 'episode' AND {feedback} AND {generations}
UNION ALL
SELECT g.id, g.created_at, (g.ended - g.place)::int, FEEDBACK
FROM controlplane_feedback f
JOIN controlplane_generation n ON n.id = f.generation_id AND n.session = f.target_id AND n.session <> ''
CROSS JOIN LATERAL (
    SELECT e.*, row_number() OVER (ORDER BY e.created_at, e.id) AS place,
           coalesce(
               nullif(count(*) FILTER (WHERE e.created_at <= least(f.occurred_at, f.created_at)) OVER (), 0),
               nullif(count(*) FILTER (WHERE e.created_at <= f.created_at) OVER (), 0),
               count(*) FILTER (WHERE (e.created_at, e.id) <= (n.created_at, n.id)) OVER ()
           ) AS ended
    FROM controlplane_generation e
    WHERE e.session = n.session AND e.session <> '' AND e.lane_id = n.lane_id AND e.user_hash = n.user_hash
) g
WHERE f.state = 'joined' AND f.target_kind = 'episode' AND g.place <= g.ended AND {feedback} AND {generations}
  AND f.target_id IN (SELECT g.session FROM controlplane_generation g WHERE g.session <> '' AND {generations})
""".replace("FEEDBACK", "f.id, f.sender, f.signal_id, f.source_id, f.actor_hash, f.occurred_at, f.created_at, f.value")


def credit_query(generations: str, *, feedback: str = EVERYTHING) -> str:
    """Joined feedback, a row for each generation that it is credited to, with `distance`: the turns between.

    `generations` is a condition on the generations `g` that count, `feedback` one on the feedback `f`.
    """
    return _CREDIT.format(generations=generations, feedback=feedback)


def feedback_credited(*, generations: Sequence[Generation], until: datetime) -> dict[UUID, list[Feedback]]:
    """Joined feedback by generation, the oldest first, as things stood `until` then.

    The same outcome is there once for each turn it is credited to, with its `distance`.
    """
    said: dict[UUID, list[Feedback]] = {row.id: [] for row in generations}
    credit = credit_query("g.id = ANY(%(ids)s)", feedback="f.created_at <= %(until)s")
    query = "SELECT generation_id, id, distance FROM (CREDIT) c".replace("CREDIT", credit)
    with connection.cursor() as cursor:
        cursor.execute(query, {"ids": list(said), "until": until})
        rows: list[tuple[UUID, UUID, int]] = cursor.fetchall()
    events = Feedback.objects.filter(id__in={feedback_id for _, feedback_id, _ in rows})
    known = {event.id: event for event in events.select_related("signal", "source")}
    for generation_id, feedback_id, distance in rows:
        credited = copy.copy(known[feedback_id])
        credited.distance = distance
        said[generation_id].append(credited)
    for heard in said.values():
        heard.sort(key=lambda event: (event.occurred_at, event.id))
    return said
