"""Withdrawal of consent: what a user said and was answered is no longer used, and where it was used is told."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from controlplane.errors import Invalid
from controlplane.models import BatchItem, Feedback, Generation, Lane
from controlplane.services.events import Actor, event_append, lane_topic
from controlplane.services.generations import user_hash
from controlplane.services.retractions import EPISODE, versions_trained_on
from controlplane.states import Consent, EventType, StepState
from rl_core.store import ObjectStore, open_store

CONTENT_LIMIT = 200  # a look: the conductor waits for the store


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """How many generations were reached, which versions were trained on some, and how many are in a batch right now."""

    generations: int
    trained_versions: list[str]
    in_training: int


@transaction.atomic
def consent_withdraw(*, lane: Lane, user_key: str, actor: Actor, reason: str) -> Withdrawal:
    """End the consent of all that the user left on the lane so far; no later window takes any of it.

    Metadata stays, as it does without consent from the beginning; texts of feedback go, content goes by
    `content_release`. What a step under way has in its batch is trained once more and counted in `in_training`: a
    batch is fixed, its version is among the trained ones when asked again. Later requests bring their own consent.

    Raises: Invalid without a key.
    """
    if not user_key:
        raise Invalid("name the user: without a key nobody is meant", "user")
    rows = Generation.objects.select_for_update().filter(lane=lane, user_hash=user_hash(lane=lane, user_key=user_key))
    found = dict(rows.values_list("id", "session"))
    trained = versions_trained_on(found)
    in_training = BatchItem.objects.filter(generation_id__in=found, step__state=StepState.BATCHED).count()
    Generation.objects.filter(id__in=found).update(consent=Consent.NONE)
    _feedback_on(lane, found).update(consent=Consent.NONE, comment="", demonstration="", tags={})
    event_append(
        project_id=lane.project_id,
        topic=lane_topic(lane.id),
        event_type=EventType.CONSENT_WITHDRAWN,
        actor=actor,
        reason=reason.replace(user_key, "withdrawn"),
        data={"generations": len(found), "versions": len(trained), "trained": trained, "in_training": in_training},
    )
    return Withdrawal(len(found), trained, in_training)


def _feedback_on(lane: Lane, found: dict[uuid.UUID, str]) -> QuerySet[Feedback]:
    sessions = {session for session in found.values() if session}
    on_them = Q(generation_id__in=list(found)) | Q(target_kind=EPISODE, target_id__in=sessions)
    return Feedback.objects.filter(on_them, project_id=lane.project_id)


def content_release(*, store: ObjectStore | None = None, limit: int = CONTENT_LIMIT) -> int:
    """Delete content that nobody consents to any more, once no step under way needs it. Returns how many blobs.

    For the conductor alone, which also makes the batches: so none is made of what is deleted here. Rows are emptied
    before blobs are deleted, so that nothing ever names a missing blob.
    """
    batches = BatchItem.objects.filter(generation_id=OuterRef("id"), step__state=StepState.BATCHED)
    with transaction.atomic():
        rows = Generation.objects.select_for_update(skip_locked=True).filter(~Exists(batches), consent=Consent.NONE)
        keys = dict(rows.exclude(content_key="").values_list("id", "content_key")[:limit])
        Generation.objects.filter(id__in=keys).update(content_key="", prompt_hash="", trainable=False)
    if keys:
        store = store or open_store(settings.STORE_URL)
        for key in keys.values():
            store.delete(key)
    return len(keys)
