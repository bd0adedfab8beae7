"""Lanes, their cadence, and their releases."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.catalog import ModelCard
from controlplane.models.fleet import Cluster
from controlplane.models.runs import Evaluation, Run
from controlplane.models.tenancy import Project, User
from controlplane.models.weights import PolicyVersion
from controlplane.states import Arm, CanaryVerdict, ReleaseState, SlotState


class Lane(Entity):
    """One served model with its cadence: the promoted version, and at most one release in flight.

    A cluster has one lane: what its replicas hold, and which of their slots is spare, follows from that lane alone.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="lanes")
    slug = models.SlugField(max_length=64)
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="lanes")
    model = models.ForeignKey(ModelCard, on_delete=models.PROTECT, related_name="lanes")
    promoted_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    approvals = models.PositiveSmallIntegerField(default=1, help_text="people other than the proposer")
    non_inferiority_margin = models.FloatField(default=0.02)
    cadence = models.JSONField(default=dict, help_text="a CadenceSpec, resolved; empty: releases by hand alone")
    next_slot_at = models.DateTimeField(null=True, help_text="null while the cadence is off, paused or held")
    paused_at = models.DateTimeField(null=True, help_text="a person paused the cadence")
    hold_reason = models.CharField(max_length=500, blank=True, help_text="an alert holds the lane until it is resolved")
    rollback_to = models.ForeignKey(
        PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+", help_text="serves once a replica holds it"
    )
    rollback_reason = models.CharField(max_length=500, blank=True)
    revision = models.PositiveIntegerField(default=1)
    record_share = models.FloatField(default=1.0, help_text="share of consented generations whose content is kept")
    redactions = models.JSONField(default=dict, help_text="name to regular expression; matches never reach storage")
    system_prompt = models.TextField(blank=True)
    salt = models.CharField(max_length=64)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "slug"], name="lane_slug_once"),
            models.UniqueConstraint(fields=["cluster"], name="one_lane_of_a_cluster"),
        ]

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
    salt = models.CharField(max_length=64, blank=True, help_text="of the canary's assignment; one experiment, one salt")
    share = models.FloatField(default=0.0, help_text="share of users, 0 to 1, that the candidate answers in the canary")
    shadow = models.JSONField(default=dict, help_text="verdict and comparison of the replayed prompts")
    spec = models.JSONField(default=dict, help_text="the lane's cadence as it was when the release began")
    outcome = models.CharField(max_length=500, blank=True, help_text="why it ended as it did")
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


class CanaryStep(Entity):
    """One share of users that a release's candidate answers, for a while; what was seen, and what was concluded."""

    release = models.ForeignKey(Release, on_delete=models.CASCADE, related_name="steps")
    position = models.PositiveSmallIntegerField()
    share = models.FloatField()
    verdict = models.CharField(max_length=12, choices=CanaryVerdict.choices, blank=True)
    analysis = models.JSONField(default=dict, help_text="arms, effects with their sequential bounds, sample ratio")
    analysed_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["release", "position"], name="canary_step_once")]

    def __str__(self) -> str:
        return f"{self.release_id}:{self.position}"


class CadenceSlot(Entity):
    """One turn of a lane's cadence: a window is trained and released, or the slot is skipped, with the reason."""

    lane = models.ForeignKey(Lane, on_delete=models.CASCADE, related_name="cadence_slots")
    number = models.PositiveIntegerField()
    state = models.CharField(max_length=12, choices=SlotState.choices, default=SlotState.OPEN)
    due_at = models.DateTimeField()
    deadline_at = models.DateTimeField(help_text="undecided by then: the slot is skipped")
    run = models.ForeignKey(Run, null=True, on_delete=models.SET_NULL, related_name="+")
    release = models.ForeignKey(Release, null=True, on_delete=models.SET_NULL, related_name="cadence_slots")
    reason = models.CharField(max_length=500, blank=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["lane", "number"], name="cadence_slot_once"),
            models.UniqueConstraint(
                fields=["lane"],
                name="one_cadence_slot_open",
                condition=models.Q(state__in=["open", "training", "releasing"]),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.lane_id}#{self.number}"


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
