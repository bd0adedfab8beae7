"""Lanes, releases, and the generations they serve."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from controlplane.models.base import Entity, new_id
from controlplane.models.catalog import ModelCard
from controlplane.models.fleet import Cluster
from controlplane.models.runs import Evaluation, Run
from controlplane.models.tenancy import Project, User
from controlplane.models.weights import PolicyVersion
from controlplane.states import Arm, Consent, ReleaseState


class Lane(Entity):
    """One served model with its cadence: the promoted version, and at most one release in flight."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="lanes")
    slug = models.SlugField(max_length=64)
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="lanes")
    model = models.ForeignKey(ModelCard, on_delete=models.PROTECT, related_name="lanes")
    promoted_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    approvals = models.PositiveSmallIntegerField(default=1, help_text="people other than the proposer")
    non_inferiority_margin = models.FloatField(default=0.02)
    cadence = models.JSONField(default=dict)
    system_prompt = models.TextField(blank=True)
    salt = models.CharField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "slug"], name="lane_slug_once")]

    def __str__(self) -> str:
        return self.slug


class Release(Entity):
    """A candidate version on its way. `revision` rises with every change, for `expected_revision`."""

    lane = models.ForeignKey(Lane, on_delete=models.CASCADE, related_name="releases")
    version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="releases")
    incumbent = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    run = models.ForeignKey(Run, null=True, on_delete=models.SET_NULL, related_name="releases")
    state = models.CharField(max_length=12, choices=ReleaseState.choices, default=ReleaseState.PENDING)
    paused_from = models.CharField(max_length=12, choices=ReleaseState.choices, blank=True)
    proposer = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    reason = models.CharField(max_length=500)
    revision = models.PositiveIntegerField(default=1)
    candidate_evaluation = models.ForeignKey(Evaluation, null=True, on_delete=models.SET_NULL, related_name="+")
    incumbent_evaluation = models.ForeignKey(Evaluation, null=True, on_delete=models.SET_NULL, related_name="+")
    gate = models.JSONField(default=dict, help_text="verdict, difference, interval, margin, n")
    finished_at = models.DateTimeField(null=True)
    promoted_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["lane"],
                name="one_release_in_flight",
                condition=models.Q(state__in=["pending", "gating", "shadow", "canary", "paused"]),
            )
        ]

    def __str__(self) -> str:
        return f"{self.lane_id}:{self.version_id}"


class Approval(Entity):
    """One person's word for a release."""

    release = models.ForeignKey(Release, on_delete=models.CASCADE, related_name="approvals")
    user = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    reason = models.CharField(max_length=500)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["release", "user"], name="approval_once")]

    def __str__(self) -> str:
        return f"{self.release_id}:{self.user_id}"


class ServedVersion(Entity):
    """What a lane's arm served, and since when: answers "which version at time T"."""

    lane = models.ForeignKey(Lane, on_delete=models.CASCADE, related_name="served")
    arm = models.CharField(max_length=8, choices=Arm.choices, default=Arm.PROMOTED)
    version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="+")
    release = models.ForeignKey(Release, null=True, on_delete=models.SET_NULL, related_name="+")
    until = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.lane_id}:{self.version_id}"


class Generation(models.Model):
    """One production inference. Its key carries its time, so that the table can be partitioned later.

    Without consent only metadata is kept: `content_key` stays empty. Others refer to it by `id` alone.
    """

    pk = models.CompositePrimaryKey("id", "created_at")
    id = models.UUIDField(default=new_id, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    lane = models.ForeignKey(Lane, on_delete=models.CASCADE, related_name="generations")
    arm = models.CharField(max_length=8, choices=Arm.choices, default=Arm.PROMOTED)
    version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="+")
    user_hash = models.CharField(max_length=64, blank=True)
    session = models.CharField(max_length=200, blank=True)
    consent = models.CharField(max_length=8, choices=Consent.choices, default=Consent.NONE)
    content_key = models.CharField(max_length=300, blank=True, help_text="trajectory blob; empty without consent")
    sampling = models.JSONField(default=dict)
    trainable = models.BooleanField(default=False, help_text="sampled from the whole distribution")
    prompt_tokens = models.PositiveIntegerField()
    sampled_tokens = models.PositiveIntegerField()
    finish_reason = models.CharField(max_length=8)
    latency_ms = models.FloatField()
    erased_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["id"]),
            models.Index(fields=["lane", "version", "created_at"]),
            models.Index(fields=["user_hash"]),
        ]

    def __str__(self) -> str:
        return str(self.id)
