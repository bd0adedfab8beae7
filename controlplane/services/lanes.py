"""Lanes: one served model each, and the pointer that says which version answers users."""

from __future__ import annotations

import secrets
from datetime import datetime

from django.db import transaction

from controlplane.errors import Conflict, Invalid
from controlplane.models import Cluster, Lane, ModelCard, PolicyVersion, Project, Release, ServedVersion
from controlplane.services.events import Actor, event_append, lane_topic
from controlplane.services.versions import lineage_create
from controlplane.states import Arm, EventType
from rl_core.types import ClusterRole


@transaction.atomic
def lane_create(
    *,
    project: Project,
    slug: str,
    cluster: Cluster,
    model: ModelCard,
    actor: Actor,
    system_prompt: str = "",
    approvals: int = 1,
    non_inferiority_margin: float = 0.02,
) -> Lane:
    """Create a lane that serves the model as it is: version 0 of a lineage of its own.

    Raises: Invalid when the cluster does not serve, or belongs to another project.
    """
    if cluster.role != ClusterRole.SERVING or cluster.project_id != project.id:
        raise Invalid(f"cluster {cluster.slug} is not a serving cluster of this project", field="cluster")
    lane = Lane.objects.create(
        project=project,
        slug=slug,
        cluster=cluster,
        model=model,
        system_prompt=system_prompt,
        approvals=approvals,
        non_inferiority_margin=non_inferiority_margin,
        salt=secrets.token_hex(32),
    )
    version = lineage_create(project=project, model=model, parent=None).head
    assert version is not None
    _point(lane=lane, version=version, release=None)
    event_append(
        project_id=project.id,
        topic=lane_topic(lane.id),
        event_type=EventType.LANE_CREATED,
        actor=actor,
        data={"lane": str(lane.id), "slug": slug, "version": str(version)},
    )
    return lane


def lane_point(*, lane: Lane, version: PolicyVersion, release: Release | None, actor: Actor, reason: str) -> Lane:
    """Make `version` the one that answers users, by compare-and-set on the version seen. In the caller's transaction.

    Raises: Conflict when the lane was pointed elsewhere meanwhile.
    """
    before = lane.promoted_version
    _point(lane=lane, version=version, release=release)
    event_append(
        project_id=lane.project_id,
        topic=lane_topic(lane.id),
        event_type=EventType.LANE_CHANGED,
        actor=actor,
        reason=reason,
        data={"lane": str(lane.id), "from": str(before) if before else None, "to": str(version)},
    )
    return lane


def _point(*, lane: Lane, version: PolicyVersion, release: Release | None) -> None:
    moved = Lane.objects.filter(id=lane.id, promoted_version=lane.promoted_version_id).update(promoted_version=version)
    if not moved:
        raise Conflict(f"lane {lane.slug} was pointed elsewhere meanwhile; read it again")
    serving = ServedVersion.objects.filter(lane=lane, arm=Arm.PROMOTED, until__isnull=True)
    served = ServedVersion.objects.create(lane=lane, arm=Arm.PROMOTED, version=version, release=release)
    served.refresh_from_db(fields=["created_at"])
    # One moment ends the old and begins the new: at no time did nothing serve.
    serving.exclude(pk=served.pk).update(until=served.created_at)
    lane.promoted_version = version


def lane_served_at(*, lane: Lane, at: datetime) -> ServedVersion | None:
    """What answered users of the lane at that time; None before its creation."""
    rows = ServedVersion.objects.filter(lane=lane, arm=Arm.PROMOTED, created_at__lte=at).select_related("version")
    return rows.exclude(until__lte=at).order_by("-created_at").first()
