"""Which feedback speaks of which generation: what was given on it, and the outcomes of its episode.

An episode is the turns of one user in one session of one lane. Its outcome is credited to every turn that was over when
it occurred; the map's `episode_discount` says how much less with each turn between.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from controlplane.models import Feedback, Generation, Lane
from controlplane.states import FeedbackState

EPISODE = "episode"
_Turn = tuple[datetime, UUID]


def feedback_credited(*, generations: Sequence[Generation], until: datetime) -> dict[UUID, list[Feedback]]:
    """Joined feedback by generation, the oldest first, as things stood `until` then: one query, three with episodes.

    The same outcome is there once for each turn it is credited to, with its `distance`.
    """
    said: dict[UUID, list[Feedback]] = {row.id: [] for row in generations}
    joined = Feedback.objects.filter(state=FeedbackState.JOINED, created_at__lte=until).select_related(
        "signal", "source"
    )
    for event in joined.filter(generation_id__in=list(said)).exclude(target_kind=EPISODE):
        if event.generation_id is not None:
            said[event.generation_id].append(event)
    sessions = {row.session for row in generations if row.session}
    lanes = {row.lane_id for row in generations}
    if sessions:
        projects = Lane.objects.filter(pk__in=lanes).values("project_id")
        outcomes = joined.filter(target_kind=EPISODE, target_id__in=sessions, project_id__in=projects)
        _credit(said, list(outcomes), _episodes(lanes, sessions))
    for events in said.values():
        events.sort(key=lambda event: (event.occurred_at, event.id))
    return said


def _episodes(lanes: set[UUID], sessions: set[str]) -> dict[UUID, list[_Turn]]:
    """The turns of each generation's episode, in order, by generation."""
    rows = Generation.objects.filter(lane__in=lanes, session__in=sessions).order_by("created_at", "id")
    found: dict[tuple[UUID, str, str], list[_Turn]] = defaultdict(list)
    of: dict[UUID, list[_Turn]] = {}
    for key, lane, session, user, at in rows.values_list("id", "lane_id", "session", "user_hash", "created_at"):
        episode = found[lane, session, user]
        episode.append((at, key))
        of[key] = episode
    return of


def _credit(said: dict[UUID, list[Feedback]], outcomes: Sequence[Feedback], episodes: dict[UUID, list[_Turn]]) -> None:
    for outcome in outcomes:
        turns = episodes.get(outcome.generation_id) if outcome.generation_id else None
        if turns is None:
            continue
        times = [at for at, _ in turns]
        # The sender's clock is believed up to the outcome's arrival. What came before its generation is about that.
        over = bisect_right(times, min(outcome.occurred_at, outcome.created_at))
        over = over or bisect_right(times, outcome.created_at) or _place(turns, outcome.generation_id) + 1
        for distance, (_, key) in enumerate(reversed(turns[:over])):
            if key in said:
                credited = copy.copy(outcome)
                credited.distance = distance
                said[key].append(credited)


def _place(turns: Sequence[_Turn], generation_id: UUID | None) -> int:
    return next(place for place, (_, key) in enumerate(turns) if key == generation_id)
