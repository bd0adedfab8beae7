"""Feedback that must not count: withdrawn by its sender, or given to a version that was found bad."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from django.db import transaction
from django.db.models import Q

from controlplane.errors import Gone, NotFound
from controlplane.models import BatchItem, Feedback, Generation, PolicyVersion, Project
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.services.transitions import sources_of, transition
from controlplane.states import EventType, FeedbackState

EPISODE = "episode"


@transaction.atomic
def feedback_retract(*, project: Project, feedback_id: uuid.UUID, actor: Actor, reason: str = "") -> list[str]:
    """Withdraw an event: a tombstone stays. Returns the versions that were trained on what it was about.

    Raises: NotFound; Gone when it was retracted before.
    """
    row = Feedback.objects.filter(project=project, id=feedback_id).first()
    if row is None:
        raise NotFound("no such feedback in this project")
    if row.state == FeedbackState.RETRACTED:
        raise Gone("this feedback was retracted before")
    trained = versions_trained_on(_generations_of(row))
    transition(row, to=FeedbackState.RETRACTED, value=None, comment="", demonstration="", tags={})
    event_append(
        project_id=project.id,
        topic=project_topic(project.id),
        event_type=EventType.FEEDBACK_CHANGED,
        actor=actor,
        reason=reason,
        data={"feedback": str(row.id), "state": row.state, "trained": trained},
    )
    return trained


def _generations_of(row: Feedback) -> list[uuid.UUID]:
    """What the event was about: a generation, or all turns of an episode."""
    if row.generation_id is None:
        return []
    if row.target_kind != EPISODE:
        return [row.generation_id]
    turns = Q(session=row.target_id, lane__project_id=row.project_id) | Q(id=row.generation_id)
    return list(Generation.objects.filter(turns).values_list("id", flat=True))


def versions_trained_on(generations: Iterable[uuid.UUID]) -> list[str]:
    """The versions in whose batches the generations were, in order."""
    items = BatchItem.objects.filter(generation_id__in=list(generations), step__version__isnull=False)
    versions = PolicyVersion.objects.filter(id__in=items.values("step__version"))
    return [str(version) for version in versions.order_by("lineage", "epoch", "number")]


def feedback_quarantine(*, version: PolicyVersion) -> int:
    """Set aside all feedback on what a bad version said, so that nothing is trained on it."""
    generations = Generation.objects.filter(version=version).values("id")
    return Feedback.objects.filter(
        generation_id__in=generations, state__in=sources_of(FeedbackState.QUARANTINED)
    ).update(state=FeedbackState.QUARANTINED)
