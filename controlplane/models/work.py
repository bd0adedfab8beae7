"""Units of work, their attempts, and the event log."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from controlplane.models.base import Entity
from controlplane.models.runs import Run
from controlplane.models.tenancy import Project
from controlplane.states import ActorKind, AttemptState, EventType, WorkKind, WorkState


class WorkUnit(Entity):
    """Something a worker is to do: the transactional outbox and the lease in one row.

    The row and the change that wants it commit together. While `queued` the dispatcher sends it at `next_send_at`
    and moves that time on; only a claim (`leased`) or an end stops the sending. `fence` counts claims: a result that
    carries an older fence is refused.
    """

    kind = models.CharField(max_length=12, choices=WorkKind.choices)
    ref = models.UUIDField(help_text="id of the row it is about; its table follows from the kind")
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="work")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="work")
    state = models.CharField(max_length=12, choices=WorkState.choices, default=WorkState.QUEUED)
    fence = models.PositiveIntegerField(default=0)
    failures = models.PositiveIntegerField(default=0)
    max_failures = models.PositiveIntegerField(default=5)
    lease_until = models.DateTimeField(null=True)
    worker = models.CharField(max_length=200, blank=True)
    next_send_at = models.DateTimeField(db_default=Now())
    sends = models.PositiveIntegerField(default=0)
    error_code = models.CharField(max_length=64, blank=True)
    error = models.CharField(max_length=1000, blank=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["kind", "ref"], name="work_unit_once")]
        indexes = [
            models.Index(fields=["next_send_at"], condition=models.Q(state="queued"), name="work_to_send"),
            models.Index(fields=["lease_until"], condition=models.Q(state="leased"), name="work_to_expire"),
        ]

    def __str__(self) -> str:
        return f"{self.kind}:{self.ref}"


class Attempt(Entity):
    """One try at a unit of work; its number is the fence it held."""

    unit = models.ForeignKey(WorkUnit, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    worker = models.CharField(max_length=200)
    state = models.CharField(max_length=12, choices=AttemptState.choices, default=AttemptState.RUNNING)
    error_code = models.CharField(max_length=64, blank=True)
    error = models.CharField(max_length=1000, blank=True)
    traceback = models.TextField(blank=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["unit", "number"], name="attempt_number_once")]

    def __str__(self) -> str:
        return f"{self.unit_id}#{self.number}"


class Topic(models.Model):
    """Counter of a topic's events. Locked while an event is appended, so that `seq` is gapless."""

    name = models.CharField(max_length=80, primary_key=True)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="topics")
    seq = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Event(models.Model):
    """Append-only record of a change, with who did it and why."""

    id = models.BigAutoField(primary_key=True)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="events")
    topic = models.ForeignKey(Topic, on_delete=models.CASCADE, related_name="events", db_column="topic")
    seq = models.BigIntegerField()
    type = models.CharField(max_length=40, choices=EventType.choices)
    at = models.DateTimeField(db_default=Now())
    actor_kind = models.CharField(max_length=12, choices=ActorKind.choices)
    actor = models.CharField(max_length=200)
    reason = models.CharField(max_length=500, blank=True)
    data = models.JSONField(default=dict)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["topic", "seq"], name="event_seq_once")]
        indexes = [models.Index(fields=["project", "-id"])]

    def __str__(self) -> str:
        return f"{self.topic_id}#{self.seq} {self.type}"
