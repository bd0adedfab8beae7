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

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "slug"], name="cluster_slug_once")]

    def __str__(self) -> str:
        return self.slug


class Replica(Entity):
    """An engine endpoint. Its tokens lie in files of the state folder, never in the database."""

    cluster = models.ForeignKey(Cluster, on_delete=models.CASCADE, related_name="replicas")
    name = models.SlugField(max_length=64)
    state = models.CharField(max_length=12, choices=ReplicaState.choices, default=ReplicaState.OFFLINE)
    inference_url = models.CharField(max_length=300, blank=True)
    control_url = models.CharField(max_length=300, blank=True)
    weight_slots = models.PositiveSmallIntegerField(default=1)
    seen_at = models.DateTimeField(null=True)
    metrics = models.JSONField(default=dict)
    error = models.CharField(max_length=500, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["cluster", "name"], name="replica_name_once")]

    def __str__(self) -> str:
        return self.name


class ReplicaSlot(Entity):
    """One resident weight set of a replica: what it should hold, and what it reported to hold."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="slots")
    slot = models.CharField(max_length=16)
    desired_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    desired_source = models.CharField(max_length=16, choices=DesiredSource.choices, blank=True)
    desired_at = models.DateTimeField(null=True)
    current_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    current_root = models.CharField(max_length=64, blank=True)
    reported_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["replica", "slot"], name="replica_slot_once")]

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.slot}"


class Transfer(Entity):
    """One replica slot's move to one version."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="transfers")
    slot = models.CharField(max_length=16)
    version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="transfers")
    from_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    state = models.CharField(max_length=12, choices=TransferState.choices, default=TransferState.PENDING)
    fetched_bytes = models.BigIntegerField(null=True)
    full_bytes = models.BigIntegerField(null=True)
    hops = models.PositiveIntegerField(null=True)
    timings = models.JSONField(default=dict, help_text="fetch_s, decode_s, verify_s, stage_s, pause_s")
    error = models.CharField(max_length=500, blank=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["replica", "-created_at"])]

    def __str__(self) -> str:
        return f"{self.replica_id}→{self.version_id}"
