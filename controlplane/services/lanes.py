"""Lanes: one served model each, and the pointer that says which version answers users."""

from __future__ import annotations

import secrets
import uuid
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F, Q

from controlplane.errors import Conflict, Invalid
from controlplane.models import CanaryStep, Cluster, Lane, ModelCard, PolicyVersion, Project, Release, ServedVersion
from controlplane.services.assignments import bucket_of
from controlplane.services.events import Actor, event_append, lane_topic
from controlplane.services.generations import user_hash
from controlplane.services.versions import lineage_create
from controlplane.states import Arm, EventType
from rl_core.types import ClusterRole


def lane_locked(lane_id: uuid.UUID) -> Lane:
    """The lane, locked until the transaction ends. Requests that only refer to it are not held up.

    Everything that moves a lane, its slots or its releases takes this lock first (see `locks`).
    """
    rows = Lane.objects.select_for_update(of=("self",), no_key=True)
    return rows.select_related("promoted_version", "cluster", "project", "model").get(pk=lane_id)


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

    Raises: Invalid when the cluster does not serve, or belongs to another project; Conflict when it has a lane already.
    """
    if cluster.role != ClusterRole.SERVING or cluster.project_id != project.id:
        raise Invalid(f"cluster {cluster.slug} is not a serving cluster of this project", field="cluster")
    Cluster.objects.select_for_update(no_key=True).get(pk=cluster.pk)  # of two lanes one sees the other
    other = Lane.objects.filter(cluster=cluster).first()
    if other is not None:
        raise Conflict(
            f"cluster {cluster.slug} serves lane {other.slug} already: each lane needs a cluster of its own", "cluster"
        )
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


def lane_record(lane: Lane, *, actor: Actor, reason: str = "", **data: Any) -> None:
    """Append a change of the lane to its log, in the caller's transaction."""
    event_append(
        project_id=lane.project_id,
        topic=lane_topic(lane.id),
        event_type=EventType.LANE_CHANGED,
        actor=actor,
        reason=reason,
        data={"lane": str(lane.id), "slug": lane.slug, **data},
    )


def lane_point(*, lane: Lane, version: PolicyVersion, release: Release | None, actor: Actor, reason: str) -> Lane:
    """Make `version` the one that answers users, by compare-and-set on the version seen. In the caller's transaction.

    Raises: Conflict when the lane was pointed elsewhere meanwhile.
    """
    before = lane.promoted_version
    _point(lane=lane, version=version, release=release)
    lane_record(lane, actor=actor, reason=reason, **{"from": str(before) if before else None, "to": str(version)})
    return lane


def _point(*, lane: Lane, version: PolicyVersion, release: Release | None) -> None:
    moved = Lane.objects.filter(id=lane.id, promoted_version=lane.promoted_version_id)
    if not moved.update(promoted_version=version, revision=F("revision") + 1):
        raise Conflict(f"lane {lane.slug} was pointed elsewhere meanwhile; read it again")
    serving = ServedVersion.objects.filter(lane=lane, arm=Arm.PROMOTED, until__isnull=True)
    served = ServedVersion.objects.create(lane=lane, arm=Arm.PROMOTED, version=version, release=release)
    served.refresh_from_db(fields=["created_at"])
    # One moment ends the old and begins the new: at no time did nothing serve.
    serving.exclude(pk=served.pk).update(until=served.created_at)
    lane.promoted_version = version
    lane.revision += 1


def lane_served_at(*, lane: Lane, at: datetime, user_key: str = "") -> ServedVersion | None:
    """What answered the lane's users at that time, or one user if a key is given; None before the lane's creation.

    During a canary a user's arm follows from the step's share and the release's salt alone, so that it can be told
    afterwards, whether or not they asked anything.
    """
    rows = ServedVersion.objects.filter(Q(until__isnull=True) | Q(until__gt=at), lane=lane, created_at__lte=at)
    rows = rows.select_related("version", "release").order_by("-created_at")
    if user_key:
        canary = rows.filter(arm=Arm.CANARY).first()
        if canary is not None and _met_canary(canary, at, user_hash(lane=lane, user_key=user_key)):
            return canary
    return rows.filter(arm=Arm.PROMOTED).first()


def _met_canary(canary: ServedVersion, at: datetime, hashed: str) -> bool:
    step = (
        CanaryStep.objects.filter(Q(ended_at__isnull=True) | Q(ended_at__gt=at), release=canary.release_id)
        .filter(created_at__lte=at)
        .order_by("-position")
        .first()
    )
    return step is not None and canary.release is not None and bucket_of(canary.release.salt, hashed) < step.share
