"""What is done to a replica: pinned, drained, repaired, lent; and what an engine does about itself."""

from __future__ import annotations

from typing import Any

from controlplane.api.base import ActionView, one
from controlplane.api.serializers.base import Input, RequiredReasonInput
from controlplane.api.serializers.fleet import (
    ClusterSerializer,
    EnrolInput,
    EnrolmentSerializer,
    PinInput,
    RenewInput,
    ReplicaSerializer,
    UnpinInput,
)
from controlplane.api.serializers.lending import LendInput
from controlplane.errors import Invalid
from controlplane.models import Cluster, Replica
from controlplane.permissions import Action
from controlplane.selectors import api_fleet as select
from controlplane.selectors.api_runs import runs_of
from controlplane.selectors.replica_tokens import Listener
from controlplane.services import enrolment, forgetting, lending, steering
from controlplane.states import WeightSlot


class _ReplicaAct(ActionView):
    """An act on a replica; answers with the replica."""

    actions = {"POST": Action.FLEET_CONTROL}
    serializer_class = ReplicaSerializer
    input_serializer: type[Input] = RequiredReasonInput

    def replica(self) -> Replica:
        """The replica of the path. Raises: NotFound."""
        replica: Replica = one(select.replicas_of(self.project), "replica", pk=self.kwargs["id"])
        return replica

    def perform(self, data: dict[str, Any]) -> Replica:
        """Do it, and say how the replica is now."""
        replica = self.replica()
        self.act(replica, data)
        fresh: Replica = select.replicas_of(self.project).get(pk=replica.pk)
        return fresh

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Call the service."""
        raise NotImplementedError


class ReplicaPin(_ReplicaAct):
    """Make a slot hold one version until it is unpinned."""

    input_serializer = PinInput

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Pin it."""
        version = select.versions_of(self.project).filter(pk=data["version"]).first()
        if version is None:
            raise Invalid("there is no such version in this project", "version")
        steering.replica_pin(
            replica=replica, slot=WeightSlot(data["slot"]), version=version, actor=self.actor, reason=data["reason"]
        )


class ReplicaUnpin(_ReplicaAct):
    """Let a pinned slot go: whoever drives its cluster says what it holds next."""

    input_serializer = UnpinInput

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Unpin it."""
        steering.replica_unpin(replica=replica, slot=WeightSlot(data["slot"]), actor=self.actor, reason=data["reason"])


class ReplicaDrain(_ReplicaAct):
    """Let a replica finish what it has and give it nothing new, until it is undrained."""

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Drain it."""
        steering.replica_drain(replica=replica, actor=self.actor, reason=data["reason"])


class ReplicaUndrain(_ReplicaAct):
    """Give a drained replica requests again."""

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Undrain it."""
        steering.replica_undrain(replica=replica, actor=self.actor, reason=data["reason"])


class ReplicaRepair(_ReplicaAct):
    """Fetch what a replica should hold from snapshots, whatever it holds now."""

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Repair it."""
        steering.replica_repair(replica=replica, actor=self.actor, reason=data["reason"])


class ReplicaLend(_ReplicaAct):
    """Lend a serving replica's spare slot to a run's rollouts, until it is called back."""

    input_serializer = LendInput

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Lend it."""
        run = runs_of(self.project).filter(pk=data["run"]).first()
        if run is None:
            raise Invalid("there is no such run in this project", "run")
        lending.replica_lend(replica=replica, run=run, actor=self.actor, reason=data["reason"])


class ReplicaReturn(_ReplicaAct):
    """Call a lent replica back."""

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Call it back."""
        lending.replica_return(replica=replica, actor=self.actor, reason=data["reason"])


class ReplicaEnrol(ActionView):
    """An engine registers itself with the cluster, or says where it listens now. It has to renew its lease."""

    actions = {"POST": Action.REPLICA_ENROL}
    serializer_class = EnrolmentSerializer
    input_serializer = EnrolInput
    secret_fields = frozenset({"inference_token", "control_token", "peer_token"})

    def perform(self, data: dict[str, Any]) -> dict[str, Any]:
        """Take it in."""
        cluster: Cluster = one(select.clusters_of(self.project), "cluster", slug=self.kwargs["slug"])
        enrolled = enrolment.replica_enrol(cluster=cluster, actor=self.actor, **data)
        return {
            "replica": select.replicas_of(self.project).get(pk=enrolled.replica.pk),
            "inference_token": enrolled.tokens[Listener.INFERENCE],
            "control_token": enrolled.tokens[Listener.CONTROL],
            "peer_token": enrolled.peer_token,
        }


class ReplicaForget(ActionView):
    """Take a replica that is gone out of the fleet; answers with its cluster."""

    actions = {"POST": Action.FLEET_CONTROL}
    serializer_class = ClusterSerializer
    input_serializer = RequiredReasonInput

    def perform(self, data: dict[str, Any]) -> Cluster:
        """Forget it."""
        replica: Replica = one(select.replicas_of(self.project), "replica", pk=self.kwargs["id"])
        forgetting.replica_forget(replica=replica, actor=self.actor, reason=data["reason"])
        fresh: Cluster = select.clusters_of(self.project).get(pk=replica.cluster_id)
        return fresh


class ReplicaLease(_ReplicaAct):
    """An engine renews its lease, or gives it up."""

    actions = {"POST": Action.REPLICA_ENROL}
    input_serializer = RenewInput

    def act(self, replica: Replica, data: dict[str, Any]) -> None:
        """Renew it."""
        enrolment.replica_renew(replica=replica, lease_s=data["lease_s"])
