"""Reads for the pages: lanes, their releases, their feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Q

from controlplane.errors import NotFound
from controlplane.models import (
    Feedback,
    FeedbackSource,
    Generation,
    Lane,
    Project,
    RejectedPayload,
    Release,
    ReplicaSlot,
    Run,
    ServedVersion,
    SignalDefinition,
    SignalMap,
)
from controlplane.services.windows import Window, window_collect
from controlplane.states import FeedbackState, ReleaseState, RunState
from rl_core.types import StageKind

PAGE = 50
IN_FLIGHT = (
    ReleaseState.PENDING,
    ReleaseState.GATING,
    ReleaseState.SHADOW,
    ReleaseState.CANARY,
    ReleaseState.PAUSED,
)


@dataclass(frozen=True, slots=True)
class LaneRow:
    """A lane as the list shows it."""

    lane: Lane
    release: Release | None
    generations: int


@dataclass(frozen=True, slots=True)
class LaneView:
    """All that a lane's page shows."""

    lane: Lane
    slots: list[ReplicaSlot]
    window: Window | None
    runs: list[Run]
    proposable: list[Run]
    releases: list[Release]
    release: Release | None
    served: list[ServedVersion]
    promoted_release: Release | None


def lane_rows(project: Project) -> list[LaneRow]:
    """The project's lanes, by name."""
    lanes = Lane.objects.filter(project=project).select_related("promoted_version", "cluster", "model")
    counts = dict(
        Generation.objects.filter(lane__project=project).values_list("lane").annotate(count=Count("id")).order_by()
    )
    flying = {release.lane_id: release for release in _releases(Q(lane__project=project, state__in=IN_FLIGHT))}
    return [LaneRow(lane, flying.get(lane.pk), counts.get(lane.pk, 0)) for lane in lanes.order_by("slug")]


def lane_view(lane: Lane) -> LaneView:
    """One lane: what it serves, what its window holds, which releases were and are."""
    releases = _releases(Q(lane=lane))[:PAGE]
    slots = ReplicaSlot.objects.filter(replica__cluster=lane.cluster).order_by("replica__name", "slot")
    runs = _runs(lane)
    proposed = {release.version_id for release in releases}
    done = [run for run in runs if run.state == RunState.COMPLETED and run.lineage.head_id not in proposed]
    return LaneView(
        lane=lane,
        slots=list(slots.select_related("replica", "current_version", "desired_version")),
        window=_window(lane),
        runs=runs,
        proposable=done,
        releases=releases,
        release=next((release for release in releases if release.state in IN_FLIGHT), None),
        served=list(ServedVersion.objects.filter(lane=lane).select_related("version").order_by("-created_at")[:PAGE]),
        promoted_release=next((row for row in releases if row.version_id == lane.promoted_version_id), None),
    )


def _releases(query: Q) -> list[Release]:
    rows = Release.objects.filter(query).select_related("version", "incumbent", "proposer", "run", "lane")
    return list(rows.prefetch_related("approvals__user").order_by("-created_at"))


def _runs(lane: Lane) -> list[Run]:
    """Runs that trained on the lane's windows, and completed runs of its model; the newest first."""
    rows = Run.objects.filter(project_id=lane.project_id, lineage__model_id=lane.model_id)
    mine = Q(stages__kind=StageKind.REALTIME.value, stages__spec__lane=lane.slug)
    rows = rows.filter(mine | Q(state=RunState.COMPLETED)).select_related("lineage__head").distinct()
    return list(rows.order_by("-created_at")[:20])


def _window(lane: Lane) -> Window | None:
    try:
        return window_collect(lane=lane)
    except NotFound:
        return None


@dataclass(frozen=True, slots=True)
class FeedbackView:
    """All that the feedback page shows."""

    events: list[Feedback]
    counts: dict[str, int]
    by_signal: list[dict[str, Any]]
    signals: list[SignalDefinition]
    signal_map: SignalMap | None
    sources: list[FeedbackSource]
    rejected: list[RejectedPayload]
    lane: Lane | None

    @property
    def total(self) -> int:
        """Events of all states."""
        return sum(self.counts.values())

    @property
    def orphan_rate(self) -> float | None:
        """The share of decided events that never found their generation; None before any was decided."""
        decided = self.total - self.counts.get(FeedbackState.PENDING, 0)
        return self.counts.get(FeedbackState.ORPHANED, 0) / decided if decided else None


def feedback_view(project: Project, *, state: str = "", signal: str = "") -> FeedbackView:
    """The newest events with the given state and signal (empty: all), and how feedback stands as a whole."""
    rows = Feedback.objects.filter(project=project)
    counts = dict(rows.values_list("state").annotate(count=Count("id")).order_by())
    by_signal = rows.values("signal__slug", "value").annotate(count=Count("id")).order_by("signal__slug", "value")
    wanted = rows.filter(state=state) if state else rows
    wanted = wanted.filter(signal__slug=signal) if signal else wanted
    return FeedbackView(
        events=list(wanted.select_related("signal", "source").order_by("-id")[:PAGE]),
        counts=counts,
        by_signal=[dict(row) for row in by_signal[:PAGE]],
        signals=list(SignalDefinition.objects.filter(project=project).order_by("slug")),
        signal_map=SignalMap.objects.filter(project=project).order_by("-number").first(),
        sources=list(FeedbackSource.objects.filter(project=project).order_by("slug")),
        rejected=list(RejectedPayload.objects.filter(project=project, replayed_at__isnull=True).order_by("-id")[:PAGE]),
        lane=Lane.objects.filter(project=project).order_by("slug").first(),
    )
