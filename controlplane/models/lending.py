"""Serving capacity that rollouts borrow: a cluster's policy, and each replica's hand-over."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.fleet import Cluster, Replica
from controlplane.models.runs import Run
from controlplane.models.weights import PolicyVersion
from controlplane.states import DesiredSource, LoanState


class LendingPolicy(Entity):
    """When a serving cluster lends, and what was seen at the last look at its load.

    Without a policy, or with `enabled` off, only a person lends. `note` says what the policy waits for now.
    """

    cluster = models.OneToOneField(Cluster, on_delete=models.CASCADE, related_name="lending")
    enabled = models.BooleanField(default=True)
    spec = models.JSONField(default=dict, help_text="a LendingSpec, resolved")
    load = models.FloatField(null=True, help_text="as the policy's source told it last; null: it could not be told")
    load_at = models.DateTimeField(null=True, help_text="when the source last told it, or was first to be asked")
    load_error = models.CharField(max_length=500, blank=True)
    quiet_since = models.DateTimeField(null=True, help_text="since when the load is low enough to lend")
    note = models.CharField(max_length=500, blank=True)

    def __str__(self) -> str:
        return str(self.cluster_id)


class Loan(Entity):
    """One replica lent to one run's rollouts. It goes on serving users from its other slot.

    A replica has at most one that is not returned. `slot` holds the run's training head while it lasts, and goes back
    to `before_version` by `return_by` once it was called back.
    """

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="loans")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="loans")
    state = models.CharField(max_length=12, choices=LoanState.choices, default=LoanState.LENT)
    slot = models.CharField(max_length=16)
    sessions = models.PositiveIntegerField(help_text="that it may roll out at once")
    by_hand = models.BooleanField(default=False)
    reason = models.CharField(max_length=500)
    before_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    before_source = models.CharField(max_length=16, choices=DesiredSource.choices, blank=True)
    returning_at = models.DateTimeField(null=True)
    return_reason = models.CharField(max_length=500, blank=True)
    return_by = models.DateTimeField(null=True)
    returned_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["replica"], condition=~models.Q(state=LoanState.RETURNED), name="one_open_loan"
            )
        ]
        indexes = [models.Index(fields=["replica", "-created_at"])]

    def __str__(self) -> str:
        return f"{self.replica_id}→{self.run_id}"
