"""Lineages and policy versions. PostgreSQL holds the heads; the object store holds the bytes."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.catalog import ModelCard
from controlplane.models.tenancy import Project
from controlplane.states import VersionState
from rl_core.types import VersionRef


class Lineage(Entity):
    """One run's chain of versions. A fork starts a new one with its parent recorded.

    `head` moves by compare-and-set alone; `epoch` is the newest epoch opened.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="lineages")
    model = models.ForeignKey(ModelCard, on_delete=models.PROTECT, related_name="lineages")
    parent = models.ForeignKey(
        "controlplane.PolicyVersion", null=True, on_delete=models.PROTECT, related_name="child_lineages"
    )
    head = models.ForeignKey("controlplane.PolicyVersion", null=True, on_delete=models.PROTECT, related_name="+")
    epoch = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return str(self.id)


class PolicyVersion(Entity):
    """`(lineage, epoch, number)`, named by the Merkle root of its weights. Number 0 is the lineage's starting point."""

    lineage = models.ForeignKey(Lineage, on_delete=models.CASCADE, related_name="versions")
    epoch = models.PositiveIntegerField()
    number = models.PositiveIntegerField()
    state = models.CharField(max_length=12, choices=VersionState.choices, default=VersionState.PUBLISHING)
    fence = models.PositiveIntegerField(default=0)
    parent = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="children")
    root = models.CharField(max_length=64, blank=True)
    manifest_key = models.CharField(max_length=300, blank=True)
    snapshot_key = models.CharField(max_length=300, blank=True)
    delta_bytes = models.BigIntegerField(null=True)
    full_bytes = models.BigIntegerField(null=True)
    changed_elements = models.BigIntegerField(null=True)
    elements = models.BigIntegerField(null=True)
    committed_at = models.DateTimeField(null=True)
    quarantined_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["lineage", "epoch", "number"], name="version_once"),
            models.CheckConstraint(
                name="committed_version_is_whole",
                condition=~models.Q(state=VersionState.COMMITTED)
                | (~models.Q(root="") & ~models.Q(manifest_key="") & models.Q(committed_at__isnull=False)),
            ),
        ]

    def __str__(self) -> str:
        return str(self.ref)

    @property
    def ref(self) -> VersionRef:
        """The version as rl_core names it."""
        return VersionRef(str(self.lineage_id), self.epoch, self.number)
