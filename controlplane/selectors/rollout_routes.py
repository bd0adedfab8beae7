"""Where the calls of a remote session may go: by its key, to the replicas of its rollout's clusters alone."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from django.db.models.functions import Now

from controlplane.models import RolloutSession
from controlplane.selectors.lane_routes import Seat
from controlplane.selectors.replica_tokens import Listener, replica_reach, replica_token
from controlplane.selectors.rollout_plans import Need, Place, RolloutPlan, oldest_allowed, places, rollout_plan
from controlplane.states import GroupState, RolloutState
from rl_core.types import VersionRef


@dataclass(frozen=True, slots=True)
class RolloutRoute:
    """A session as its calls see it at one moment. Never a lane: training versions and users do not meet.

    On a replica that is lent its seat is the slot with the training version, which no user's request can name.
    """

    session_id: uuid.UUID
    plan: RolloutPlan
    min_version: VersionRef | None
    seats: tuple[Seat, ...]


def rollout_route(digest: str) -> RolloutRoute | None:
    """The route of the session whose key has this digest; None once the session, its rollout or its group has ended."""
    live = RolloutSession.objects.filter(
        digest=digest,
        ended_at__isnull=True,
        deadline_at__gt=Now(),
        rollout__state=RolloutState.RUNNING,
        rollout__group__state=GroupState.RUNNING,
    )
    related = ("rollout__group__run", "rollout__group__evaluation", "rollout__group__stage")
    session = live.select_related(*related, "rollout__group__task__task_set").first()
    if session is None:
        return None
    plan = rollout_plan(session.rollout.group)
    oldest = None if plan.exact_version else oldest_allowed(plan.lineage_id, plan.max_staleness)
    need = Need(plan, oldest)
    fitting = [place for place in places({plan.project_id}) if need.allows(place)]
    seats = [seat for place in fitting if (seat := _seat(place)) is not None]
    return RolloutRoute(session.pk, plan, oldest, tuple(seats))


def _seat(place: Place) -> Seat | None:
    try:
        token = replica_token(place.replica_id, Listener.INFERENCE, enrolment=place.enrolment)
    except FileNotFoundError:
        return None  # it cannot be asked from this machine
    return Seat(place.replica_id, place.url, token, place.slot, place.background, replica_reach(place.enrolment))
