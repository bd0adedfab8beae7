"""Signals, sources, and the feedback they send."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now

from controlplane.models.base import Entity, new_id
from controlplane.models.tenancy import Project, User
from controlplane.states import Consent, FeedbackState, PayloadKind, SignalType

# What a sender without a source of its own may send, and the limits that a new source begins with.
RATE_PER_MINUTE = 60_000
ACTOR_RATE_PER_MINUTE = 6_000


class SignalDefinition(Entity):
    """A defined kind of user signal: its type and range."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="signals")
    slug = models.SlugField(max_length=64)
    value_type = models.CharField(max_length=8, choices=SignalType.choices)
    minimum = models.FloatField(null=True)
    maximum = models.FloatField(null=True)
    categories = ArrayField(models.CharField(max_length=64), default=list)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "slug"], name="signal_slug_once")]

    def __str__(self) -> str:
        return self.slug


class SignalMap(Entity):
    """An immutable version of the map from signals to reward."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="signal_maps")
    number = models.PositiveIntegerField()
    content_hash = models.CharField(max_length=64)
    content = models.JSONField()
    author = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "number"], name="signal_map_number_once")]

    def __str__(self) -> str:
        return str(self.number)


class FeedbackSource(Entity):
    """Who sends feedback, by webhook or under API keys of its own. Up to two signing secrets are live, for rotation.

    Secrets are kept encrypted with a key derived from the server's secret key: a signature must be recomputed, so a
    hash would not do.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="sources")
    slug = models.SlugField(max_length=64, unique=True)
    sealed_secrets = ArrayField(models.TextField(), default=list)
    trust_weight = models.FloatField(default=1.0)
    rate_per_minute = models.PositiveIntegerField(default=RATE_PER_MINUTE)
    actor_rate_per_minute = models.PositiveIntegerField(
        default=ACTOR_RATE_PER_MINUTE, help_text="events of one of its actors"
    )
    disabled_at = models.DateTimeField(null=True)
    unauthenticated_count = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return self.slug


class FeedbackReceipt(Entity):
    """Deduplication, outside any partition: one row for each (sender, event id) ever accepted."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+", db_index=False)
    sender = models.CharField(max_length=80, help_text="source slug, or the API key's id")
    event_id = models.CharField(max_length=100)
    body_hash = models.CharField(max_length=64)
    feedback_id = models.UUIDField()
    repeats = models.PositiveIntegerField(default=0, help_text="how often the event was sent again")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "sender", "event_id"], name="feedback_event_once")]

    def __str__(self) -> str:
        return self.event_id


class Feedback(models.Model):
    """One event of a signal about a generation. Its key carries its time, so that it can be partitioned later."""

    pk = models.CompositePrimaryKey("id", "created_at")
    id = models.UUIDField(default=new_id, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="feedback", db_index=False)
    sender = models.CharField(max_length=80)
    source = models.ForeignKey(FeedbackSource, null=True, on_delete=models.SET_NULL, related_name="feedback")
    signal = models.ForeignKey(SignalDefinition, on_delete=models.PROTECT, related_name="feedback", db_index=False)
    state = models.CharField(max_length=12, choices=FeedbackState.choices)
    target_kind = models.CharField(max_length=12)
    target_id = models.CharField(max_length=200)
    generation_id = models.UUIDField(null=True)
    value = models.JSONField(null=True)
    occurred_at = models.DateTimeField()
    actor_hash = models.CharField(max_length=64, blank=True)
    actor_kind = models.CharField(max_length=8, default="user")
    comment = models.TextField(blank=True)
    demonstration = models.TextField(blank=True)
    tags = models.JSONField(default=dict)
    consent = models.CharField(max_length=8, choices=Consent.choices, default=Consent.NONE)
    distance = 0  # not stored: turns between the generation that an episode's outcome is credited to and the outcome

    class Meta:
        indexes = [
            models.Index(fields=["generation_id"]),
            models.Index(fields=["project", "-created_at"]),
            models.Index(fields=["target_id"], condition=models.Q(state="pending"), name="feedback_to_join"),
            models.Index(fields=["target_id"], condition=models.Q(target_kind="episode"), name="feedback_of_episode"),
        ]

    def __str__(self) -> str:
        return str(self.id)


class RejectedPayload(Entity):
    """A payload refused after its sender was authenticated, kept for replay; capped in size and age."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="rejected_payloads")
    sender = models.CharField(max_length=80)
    kind = models.CharField(max_length=16, choices=PayloadKind.choices, default=PayloadKind.FEEDBACK)
    body = models.TextField()
    code = models.CharField(max_length=64)
    detail = models.CharField(max_length=1000)
    replayed_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["project", "-created_at"], name="rejected_newest")]

    def __str__(self) -> str:
        return f"{self.sender}:{self.code}"
