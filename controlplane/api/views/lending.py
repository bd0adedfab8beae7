"""Lending: whether the project allows it, each cluster's policy, and every hand-over."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import LoanFilter
from controlplane.api.serializers.lending import (
    LendingAllowedInput,
    LendingPolicyInput,
    LendingPolicySerializer,
    LoanSerializer,
)
from controlplane.api.serializers.runs import SpecSchemaSerializer
from controlplane.api.serializers.tenancy import ProjectSerializer
from controlplane.models import Cluster, LendingPolicy, Loan, Project
from controlplane.permissions import Action
from controlplane.selectors import api_fleet as select
from controlplane.services import lending
from rl_core.lending import lending_schema


class LendingSchema(DetailView):
    """The JSON Schema of a lending policy's spec."""

    serializer_class = SpecSchemaSerializer

    def get(self, request: Request, **kwargs: Any) -> Response:
        """The document."""
        return Response(lending_schema())


class LendingAllowed(ActionView):
    """Allow rollouts on replicas that serve users, in this project, or forbid it."""

    actions = {"POST": Action.FLEET_CONTROL}
    serializer_class = ProjectSerializer
    input_serializer = LendingAllowedInput

    def perform(self, data: dict[str, Any]) -> Project:
        """Allow or forbid."""
        return lending.lending_allow(project=self.project, actor=self.actor, **data)


class ClusterLending(Post, DetailView):
    """When a serving cluster lends. POST sets it."""

    actions = {"GET": Action.READ, "POST": Action.FLEET_CONTROL}
    serializer_class = LendingPolicySerializer
    input_serializer = LendingPolicyInput
    success_status = 200

    def row(self) -> LendingPolicy:
        """The policy of the path's cluster."""
        policy: LendingPolicy = one(
            select.policies_of(self.project), "lending policy", cluster__slug=self.kwargs["slug"]
        )
        return policy

    def perform(self, data: dict[str, Any]) -> LendingPolicy:
        """Set it."""
        cluster: Cluster = one(select.clusters_of(self.project), "cluster", slug=self.kwargs["slug"])
        return lending.lending_set(cluster=cluster, actor=self.actor, **data)


class LoanList(ListView):
    """Hand-overs of serving replicas to rollouts, newest first."""

    serializer_class = LoanSerializer
    filterset_class = LoanFilter

    def rows(self) -> QuerySet[Loan]:
        """Loans."""
        return select.loans_of(self.project)


class LoanDetail(DetailView):
    """One hand-over."""

    serializer_class = LoanSerializer

    def row(self) -> Loan:
        """The loan of the path."""
        loan: Loan = one(select.loans_of(self.project), "loan", pk=self.kwargs["id"])
        return loan
