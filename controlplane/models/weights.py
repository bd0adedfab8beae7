"""Lineages and policy versions. PostgreSQL holds the heads; the object store holds the bytes."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.catalog import ModelCard
from controlplane.models.tenancy import Project
from controlplane.states import PublicationKind, VersionState
from rl_core.types import Profile, VersionRef, WeightFormat

FORMATS = [(value.value, value.value) for value in WeightFormat]
PROFILES = [(value.value, value.value) for value in Profile]


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
    """`(lineage, epoch, number)`, named by the Merkle root of its weights. Number 0 is the lineage's starting point.

    `depth` counts the steps since the model's own weights, over all lineages in between. A version that is `retired`
    stays in the record; its weights may be gone from the store, and nothing may hold it any more.
    """

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
    depth = models.PositiveIntegerField(default=0)
    committed_at = models.DateTimeField(null=True)
    quarantined_at = models.DateTimeField(null=True)
    retired_at = models.DateTimeField(null=True)

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


class Publication(Entity):
    """A snapshot or a delta of a version's weights in the object store; planned until `published_at`.

    `root` names the weights in their `format`, `base_root` those that a delta is made from: paths are found over
    roots, since a lineage begins with the weights of another. Once `deleted_at` no reader is told of it; its objects
    are collected after the grace period. `profile` is what the trainer was to save in it, and why.
    """

    version = models.ForeignKey(PolicyVersion, on_delete=models.CASCADE, related_name="publications")
    base_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    kind = models.CharField(max_length=12, choices=PublicationKind.choices)
    format = models.CharField(max_length=12, choices=FORMATS, default=WeightFormat.BF16.value)
    root = models.CharField(max_length=64, blank=True)
    base_root = models.CharField(max_length=64, blank=True)
    manifest_key = models.CharField(max_length=300, blank=True, db_index=True)
    bytes = models.BigIntegerField(null=True)
    full_bytes = models.BigIntegerField(null=True)
    profile = models.CharField(max_length=8, choices=PROFILES, blank=True)
    profile_reason = models.CharField(max_length=200, blank=True)
    encode_s = models.FloatField(null=True, help_text="of encoding alone; null: not known, or adopted")
    upload_s = models.FloatField(null=True, help_text="of sending alone; null: not known, or little was sent")
    published_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["version", "format", "kind", "base_version"],
                condition=models.Q(deleted_at__isnull=True),
                nulls_distinct=False,
                name="publication_once",
            ),
            models.CheckConstraint(
                name="published_is_whole",
                condition=models.Q(published_at__isnull=True) | (~models.Q(root="") & ~models.Q(manifest_key="")),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.format} {self.manifest_key}"
