"""Reads for the pages: lanes, what they serve, and what could be released on them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Q

from controlplane.models import Alert, Generation, Lane, Project, Release, ReplicaSlot, Run
from controlplane.selectors.pages_cadence import LaneMood, lane_mood
from controlplane.selectors.pages_releases import releases_of
from controlplane.services.cadence import cadence_of
from controlplane.services.clock import database_now
from controlplane.services.releases import IN_FLIGHT
from controlplane.states import RunState
from rl_core.shipping.specs import CadenceSpec
from rl_core.types import StageKind

PAGE = 50
RUNS = 20


@dataclass(frozen=True, slots=True)
class LaneRow:
    """A lane as the list shows it."""

    lane: Lane
    mood: LaneMood
    release: Release | None
    generations: int
    alerts: int

    @property
    def next_at(self) -> datetime | None:
        """When its next slot is due, if one is planned."""
        return self.lane.next_slot_at if self.mood in (LaneMood.RUNNING, LaneMood.FROZEN) else None


@dataclass(frozen=True, slots=True)
class Shipping:
    """What was released on a lane, what could be, and what its replicas hold."""

    releases: list[Release]
    flying: Release | None
    promoted: Release | None
    proposable: list[Run]
    slots: list[ReplicaSlot]


def lane_rows(project: Project) -> list[LaneRow]:
    """The project's lanes, by name."""
    lanes = Lane.objects.filter(project=project).select_related("promoted_version", "cluster", "model")
    counts = dict(
        Generation.objects.filter(lane__project=project).values_list("lane").annotate(count=Count("id")).order_by()
    )
    alerts = Alert.objects.filter(project=project, resolved_at__isnull=True, lane__isnull=False)
    raised = dict(alerts.values_list("lane").annotate(count=Count("id")).order_by())
    flying = {release.lane_id: release for release in releases_of(Q(lane__project=project, state__in=IN_FLIGHT))}
    now = database_now()
    return [
        LaneRow(
            lane=lane,
            mood=lane_mood(lane, cadence_of(lane) or CadenceSpec(), now=now)[0],
            release=flying.get(lane.pk),
            generations=counts.get(lane.pk, 0),
            alerts=raised.get(lane.pk, 0),
        )
        for lane in lanes.order_by("slug")
    ]


def lane_releases(lane: Lane) -> list[Release]:
    """The lane's releases, the newest first."""
    return list(releases_of(Q(lane=lane))[:PAGE])


def shipping_of(lane: Lane, releases: list[Release]) -> Shipping:
    """Everything about versions on their way; `releases` are the lane's newest."""
    slots = ReplicaSlot.objects.filter(replica__cluster=lane.cluster).order_by("replica__name", "slot")
    proposed = {release.version_id for release in releases}
    promoted = next((row for row in releases if row.version_id == lane.promoted_version_id), None)
    return Shipping(
        releases=releases,
        flying=next((release for release in releases if release.state in IN_FLIGHT), None),
        promoted=promoted,
        proposable=[run for run in _runs(lane) if run.lineage.head_id not in proposed],
        slots=list(slots.select_related("replica", "current_version", "desired_version")),
    )


def _runs(lane: Lane) -> list[Run]:
    """Completed runs of the lane's model, those that trained on its windows among them; the newest first."""
    rows = Run.objects.filter(project_id=lane.project_id, lineage__model_id=lane.model_id, state=RunState.COMPLETED)
    mine = Q(stages__kind=StageKind.REALTIME.value, stages__spec__lane=lane.slug)
    others = ~Q(stages__kind=StageKind.REALTIME.value)
    rows = rows.filter(mine | others, lineage__head__number__gt=0).select_related("lineage__head").distinct()
    return list(rows.order_by("-created_at")[:RUNS])
