"""Erasure: at a user's wish, what is kept of them goes; content-free tombstones stay."""

from __future__ import annotations

import json
import uuid

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from controlplane.errors import Invalid
from controlplane.models import Feedback, Generation, Lane, RejectedPayload
from controlplane.services.events import Actor, event_append, lane_topic
from controlplane.services.generations import user_hash
from controlplane.states import Consent, EventType
from rl_core.store import ObjectStore

TOMBSTONE = "erased"


def user_erase(*, lane: Lane, user_key: str, actor: Actor, reason: str, store: ObjectStore) -> int:
    """Delete what is kept of a user's content on a lane, and every trace of the key. Returns generations erased.

    That is: trajectory blobs; session, segment, hashes and sampling of the rows; texts, tags and targets of feedback on
    those generations, on their sessions, or given under the user's key or hash; refused payloads that name any of them.
    Counts, versions and times stay. Rows are emptied before blobs are deleted, so that nothing ever names a missing
    blob. Safe to repeat: what came in meanwhile goes too.

    Raises: Invalid without a key.
    """
    if not user_key:
        raise Invalid("name the user: without a key nobody is meant", "user")
    hashed = user_hash(lane=lane, user_key=user_key)
    with transaction.atomic():
        rows = list(
            Generation.objects.select_for_update()
            .filter(lane=lane, user_hash=hashed, erased_at__isnull=True)
            .values("id", "session", "content_key")
        )
        ids = [row["id"] for row in rows]
        sessions = sorted({row["session"] for row in rows if row["session"]})
        Generation.objects.filter(id__in=ids).update(
            content_key="",
            user_hash="",
            session="",
            segment="",
            sampling={},
            prompt_hash="",
            trainable=False,
            consent=Consent.NONE,
            erased_at=Now(),
        )
        _erase_feedback(lane, ids, sessions, names=[user_key, hashed])
        _erase_rejected(lane, [user_key, hashed, *sessions, *map(str, ids)])
        event_append(
            project_id=lane.project_id,
            topic=lane_topic(lane.id),
            event_type=EventType.USER_ERASED,
            actor=actor,
            reason=reason.replace(user_key, TOMBSTONE),
            data={"generations": len(ids)},
        )
    for row in rows:
        if row["content_key"]:
            store.delete(row["content_key"])
    return len(ids)


def _erase_feedback(lane: Lane, ids: list[uuid.UUID], sessions: list[str], *, names: list[str]) -> None:
    """Values stay: they are numbers, flags or defined categories. An episode's target is the session itself."""
    of_user = Q(generation_id__in=ids) | Q(target_id__in=[*map(str, ids), *sessions]) | Q(actor_hash__in=names)
    rows = Feedback.objects.filter(of_user, project_id=lane.project_id)
    rows.filter(target_kind="episode").update(target_id=TOMBSTONE)
    rows = Feedback.objects.filter(of_user | Q(target_id=TOMBSTONE), project_id=lane.project_id)
    rows.update(comment="", demonstration="", tags={}, actor_hash="")


def _erase_rejected(lane: Lane, needles: list[str]) -> None:
    """Refused payloads are few and bounded: they are searched as text, as it is and as JSON escapes it."""
    naming = Q()
    for needle in {*needles, *(json.dumps(needle)[1:-1] for needle in needles)}:
        naming |= Q(body__contains=needle) | Q(detail__contains=needle)
    RejectedPayload.objects.filter(naming, project_id=lane.project_id).delete()
