"""Where a lane's requests may go: its arms, the versions that they serve, and the replica slots that hold them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from django.db.models import Q

from controlplane.models import Lane, PolicyVersion, Release, Replica, ReplicaSlot
from controlplane.selectors.answering import answering_slots, on_loan
from controlplane.selectors.replica_tokens import Listener, replica_reach, replica_token
from controlplane.services.assignments import Assignment, Experiment, arm_assign
from controlplane.services.generations import user_hash
from controlplane.states import Arm, ReleaseState
from rl_core.destinations import Reach


@dataclass(frozen=True, slots=True)
class Seat:
    """One weight slot of one replica that holds a version. Requests in the `background` give way to users there.

    `reach` bounds where its URL may lead; None trusts it.
    """

    replica_id: uuid.UUID
    url: str
    token: str
    slot: str
    background: bool = False
    reach: Reach | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One arm: its version, and where that is resident now."""

    arm: Arm
    version: PolicyVersion
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class LaneRoute:
    """A lane as requests see it at one moment. `experiment` is its canary, while there is one."""

    lane: Lane
    promoted: Side
    canary: Side | None = None
    experiment: Experiment | None = None

    def assign(self, user_key: str) -> tuple[Side, Assignment]:
        """The side that answers this user, and the experiment in which it counts."""
        assignment = arm_assign(self.experiment, user_hash=user_hash(lane=self.lane, user_key=user_key))
        if assignment.arm == Arm.CANARY and self.canary is not None:
            return self.canary, assignment
        return self.promoted, assignment


def lane_route(*, project_id: uuid.UUID, slug: str) -> LaneRoute | None:
    """The route of the project's lane; None when there is no such lane, or it has promoted nothing."""
    lanes = Lane.objects.select_related("promoted_version", "project", "model")
    lane = lanes.filter(project_id=project_id, slug=slug).first()
    if lane is None or lane.promoted_version is None:
        return None
    release = _canary(lane)
    versions = [lane.promoted_version, *([release.version] if release else [])]
    seats = _seats(lane, versions)
    promoted = Side(Arm.PROMOTED, lane.promoted_version, seats[lane.promoted_version.id])
    if release is None:
        return LaneRoute(lane, promoted)
    # Newest first: when every step has ended (a pause between two), the last one's numbers still hold.
    step = release.steps.order_by("-position").values_list("position", flat=True).first()
    experiment = Experiment(release.id, release.salt, release.share, step)
    return LaneRoute(lane, promoted, Side(Arm.CANARY, release.version, seats[release.version_id]), experiment)


def _canary(lane: Lane) -> Release | None:
    """The release in its canary. A paused one keeps its arms."""
    canary = Q(state=ReleaseState.CANARY) | Q(state=ReleaseState.PAUSED, paused_from=ReleaseState.CANARY)
    return Release.objects.filter(canary, lane=lane).select_related("version").order_by("-created_at").first()


def _seats(lane: Lane, versions: list[PolicyVersion]) -> dict[uuid.UUID, tuple[Seat, ...]]:
    """Seats by version: of replicas that answer, and of slots that are not lent, whatever these hold.

    A replica whose token is not on this machine cannot be asked from here.
    """
    found: dict[uuid.UUID, tuple[Seat, ...]] = {version.id: () for version in versions}
    slots = ReplicaSlot.objects.filter(
        answering_slots(), ~on_loan(), replica__cluster=lane.cluster_id, current_version__in=versions
    )
    for slot in slots.select_related("replica").order_by("replica_id", "slot"):
        token = inference_token(slot.replica)
        if token and slot.current_version_id:
            reach = replica_reach(slot.replica.enrolment)
            seat = Seat(slot.replica_id, slot.replica.inference_url, token, slot.slot, reach=reach)
            found[slot.current_version_id] += (seat,)
    return found


def inference_token(replica: Replica) -> str:
    """What the replica's inference port asks for; empty where its file is not on this machine."""
    try:
        return replica_token(replica.pk, Listener.INFERENCE, enrolment=replica.enrolment)
    except FileNotFoundError:
        return ""
