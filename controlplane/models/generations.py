"""Generations: what a lane's users asked and its arms answered."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from controlplane.models.base import new_id
from controlplane.models.lanes import Lane, Release
from controlplane.models.weights import PolicyVersion
from controlplane.states import Arm, Consent, GenerationOutcome


class Generation(models.Model):
    """One production inference. Its key carries its time, so that the table can be partitioned later.

    Without consent only metadata is kept: `content_key` stays empty. Others refer to it by `id` alone.
    """

    pk = models.CompositePrimaryKey("id", "created_at")
    id = models.UUIDField(default=new_id, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    lane = models.ForeignKey(Lane, on_delete=models.CASCADE, related_name="generations")
    arm = models.CharField(max_length=8, choices=Arm.choices, default=Arm.PROMOTED)
    release = models.ForeignKey(Release, null=True, on_delete=models.SET_NULL, related_name="generations")
    canary_step = models.PositiveSmallIntegerField(null=True, help_text="position of the step that assigned the user")
    outcome = models.CharField(max_length=10, choices=GenerationOutcome.choices, default=GenerationOutcome.ANSWERED)
    version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="+")
    user_hash = models.CharField(max_length=64, blank=True)
    session = models.CharField(max_length=200, blank=True)
    segment = models.CharField(max_length=64, blank=True, help_text="what the product says of its user beforehand")
    consent = models.CharField(max_length=8, choices=Consent.choices, default=Consent.NONE)
    content_key = models.CharField(max_length=300, blank=True, help_text="trajectory blob; empty without consent")
    sampling = models.JSONField(default=dict)
    trainable = models.BooleanField(default=False, help_text="sampled from the whole distribution")
    prompt_tokens = models.PositiveIntegerField()
    sampled_tokens = models.PositiveIntegerField()
    finish_reason = models.CharField(max_length=8)
    latency_ms = models.FloatField()
    first_token_ms = models.FloatField(null=True)
    prompt_hash = models.CharField(max_length=64, blank=True, help_text="of the prompt's tokens")
    behaviour = models.JSONField(default=dict, help_text="what the hack monitors count: see rl_core.signals.behaviour")
    erased_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["id"]),
            models.Index(fields=["lane", "version", "created_at"]),
            models.Index(fields=["user_hash"]),
            models.Index(fields=["session"], condition=~models.Q(session=""), name="generation_session"),
            models.Index(
                fields=["release", "canary_step"],
                condition=models.Q(release__isnull=False),
                name="generation_experiment",
            ),
            models.Index(
                fields=["created_at"],
                condition=models.Q(consent=Consent.NONE) & ~models.Q(content_key=""),
                name="generation_to_release",
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)
