"""Clusters, their replicas, and the movement of weights to them."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.tenancy import Project
from controlplane.models.weights import PolicyVersion
from controlplane.states import DesiredSource, ReplicaState, TransferState
from rl_core.types import ClusterRole

ROLES = [(role.value, role.value) for role in ClusterRole]


class Cluster(Entity):
    """A place with engines or a trainer."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="clusters")
    slug = models.SlugField(max_length=64)
    role = models.CharField(max_length=8, choices=ROLES)
    region = models.CharField(max_length=64)
    capacity = models.PositiveIntegerField(help_text="sessions it may run at once, all replicas together")
    local = models.BooleanField(default=False, help_text="its engines are started by `manage.py up`")
    model = models.ForeignKey("controlplane.ModelCard", null=True, on_delete=models.PROTECT, related_name="clusters")
    bandwidth_bytes_s = models.BigIntegerField(
        null=True, help_text="what transfers to it may take of its link, all replicas together; null: no limit"
    )
    device = models.CharField(max_length=64, blank=True, help_text="what its engines run on, as the operator calls it")
    devices = models.PositiveSmallIntegerField(default=1, help_text="of one replica")
    dollars_device_hour = models.FloatField(null=True, help_text="what one of its devices costs; null: not known")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "slug"], name="cluster_slug_once")]

    def __str__(self) -> str:
        return self.slug


class Replica(Entity):
    """An engine endpoint. Its tokens never stand in the database: `controlplane.selectors.replica_tokens` finds them.

    `drained_at` is a person's wish, kept whatever the replica does; `state` says how far it has come. A replica with a
    lease registered itself, and takes no requests once `lease_until` is past by the database's clock.
    """

    cluster = models.ForeignKey(Cluster, on_delete=models.CASCADE, related_name="replicas")
    name = models.SlugField(max_length=64)
    state = models.CharField(max_length=12, choices=ReplicaState.choices, default=ReplicaState.OFFLINE)
    inference_url = models.CharField(max_length=300, blank=True)
    control_url = models.CharField(max_length=300, blank=True)
    weight_slots = models.PositiveSmallIntegerField(default=1)
    seen_at = models.DateTimeField(null=True)
    metrics = models.JSONField(default=dict)
    error = models.CharField(max_length=500, blank=True)
    lease_until = models.DateTimeField(null=True, help_text="null: registered by the operator, without a lease")
    enrolments = models.PositiveIntegerField(default=0, help_text="how often it registered itself")
    drained_at = models.DateTimeField(null=True)
    drained_reason = models.CharField(max_length=500, blank=True)
    repairs = models.PositiveSmallIntegerField(default=0, help_text="tried by itself since it last was well for long")
    repaired_at = models.DateTimeField(null=True, help_text="when the last repair began")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["cluster", "name"], name="replica_name_once")]

    @property
    def enrolment(self) -> int | None:
        """The number of its last registration of itself; None: the operator registered it."""
        return None if self.lease_until is None else self.enrolments

    def __str__(self) -> str:
        return self.name


class ReplicaSlot(Entity):
    """One resident weight set of a replica: what it should hold, and what it reported to hold.

    `desired_at` is since when it should hold that; where it held it and lost it, since it was seen to have lost it.
    """

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="slots")
    slot = models.CharField(max_length=16)
    desired_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    desired_source = models.CharField(max_length=16, choices=DesiredSource.choices, blank=True)
    desired_at = models.DateTimeField(null=True)
    desired_reason = models.CharField(max_length=500, blank=True)
    current_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    current_root = models.CharField(max_length=64, blank=True)
    reported_at = models.DateTimeField(null=True)
    fault = models.CharField(max_length=500, blank=True, help_text="why its weights are not to be trusted")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["replica", "slot"], name="replica_slot_once")]

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.slot}"

    def awaits(self, version: PolicyVersion | None) -> bool:
        """Whether it is told to hold that version already, and does not hold it yet."""
        return version is not None and self.desired_version_id == version.pk != self.current_version_id


class Transfer(Entity):
    """One replica slot's move to one version."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="transfers")
    slot = models.CharField(max_length=16)
    version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="transfers")
    from_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    state = models.CharField(max_length=12, choices=TransferState.choices, default=TransferState.PENDING)
    fetched_bytes = models.BigIntegerField(null=True)
    full_bytes = models.BigIntegerField(null=True)
    repair = models.BooleanField(default=False, help_text="from a snapshot, whatever the replica holds")
    phase = models.CharField(max_length=8, blank=True, help_text="fetch, decode, verify or stage, while it runs")
    done_bytes = models.BigIntegerField(null=True)
    total_bytes = models.BigIntegerField(null=True)
    bytes_per_s = models.FloatField(null=True, help_text="so far; then what the store gave, null if it gave nothing")
    remaining_s = models.FloatField(null=True)
    hops = models.PositiveIntegerField(null=True)
    timings = models.JSONField(default=dict, help_text="fetch_s, decode_s, verify_s, stage_s, pause_s")
    error = models.CharField(max_length=500, blank=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["replica", "-created_at"])]

    def __str__(self) -> str:
        return f"{self.replica_id}→{self.version_id}"
