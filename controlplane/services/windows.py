"""The window of a real-time stage: which generations and which feedback become its one batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.errors import NotFound
from controlplane.models import BatchItem, Feedback, Generation, Lane, Project, Run, SignalMap, User
from controlplane.services.events import Actor
from controlplane.services.runs import run_create
from controlplane.services.signals import SignalMapContent, reward_of
from controlplane.states import Consent, FeedbackState
from rl_core.types import StageKind

MAX_WINDOW = 2000


@dataclass(frozen=True, slots=True)
class WindowItem:
    """One generation with the reward that its users' feedback gives it."""

    generation: Generation
    reward: float


@dataclass(frozen=True, slots=True)
class Window:
    """What a stage would train on now, and why the rest is left out."""

    items: list[WindowItem]
    generations: int
    silent: int
    untrainable: int
    without_consent: int


def lane_named(*, project: Project, slug: str) -> Lane:
    """The project's lane. Raises: NotFound."""
    lane = Lane.objects.select_related("promoted_version", "cluster", "project", "model").filter(
        project=project, slug=slug
    )
    found = lane.first()
    if found is None:
        raise NotFound(f"no lane {slug!r} in this project", field="lane")
    return found


def window_collect(*, lane: Lane) -> Window:
    """Generations of the promoted version that no step has consumed, with consent to train, sampled untruncated.

    A generation without feedback of the map is left out (silence is dropped). The newest `MAX_WINDOW` are read.
    """
    content = signal_map_current(project=lane.project)
    consumed = BatchItem.objects.filter(generation_id__isnull=False).values("generation_id")
    rows = Generation.objects.filter(lane=lane, version=lane.promoted_version_id, erased_at__isnull=True)
    generations = list(rows.exclude(id__in=consumed).order_by("-created_at")[:MAX_WINDOW])
    allowed = [row for row in generations if row.consent == Consent.TRAIN and row.content_key]
    usable = [row for row in allowed if row.trainable]
    events: dict[object, list[Feedback]] = defaultdict(list)
    joined = Feedback.objects.filter(generation_id__in=[row.id for row in usable], state=FeedbackState.JOINED)
    for event in joined.select_related("signal", "source"):
        events[event.generation_id].append(event)
    items = []
    for row in reversed(usable):
        reward = reward_of(content, events[row.id])
        if reward is not None:
            items.append(WindowItem(row, reward))
    return Window(
        items=items,
        generations=len(generations),
        silent=len(usable) - len(items),
        untrainable=len(allowed) - len(usable),
        without_consent=len(generations) - len(allowed),
    )


def lane_train(
    *, lane: Lane, name: str, actor: Actor, user: User | None, overrides: dict[str, Any] | None = None
) -> Run:
    """Create the run that trains the lane's promoted version on its present window.

    `overrides` replace fields of the real-time stage. Raises: Invalid.
    """
    stage = {"kind": StageKind.REALTIME.value, "lane": lane.slug, **(overrides or {})}
    return run_create(
        project=lane.project,
        name=name,
        spec={"model": lane.model.slug, "stages": [stage]},
        actor=actor,
        user=user,
        parent_version=lane.promoted_version,
    )


def signal_map_current(*, project: Project) -> SignalMapContent:
    """The newest published map. Raises: NotFound when there is none."""
    row = SignalMap.objects.filter(project=project).order_by("-number").first()
    if row is None:
        raise NotFound("this project has no signal map yet; publish one on the feedback page")
    return msgspec.convert(row.content, type=SignalMapContent)
