"""Lanes, releases, and what lanes generated."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter
from rest_framework.fields import DateTimeField

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import GenerationFilter
from controlplane.api.serializers.lanes import (
    ErasedSerializer,
    EraseInput,
    GenerationSerializer,
    LaneInput,
    LaneSerializer,
    ServedSerializer,
    TrainInput,
    WithdrawInput,
    WithdrawnSerializer,
)
from controlplane.api.serializers.runs import RunSerializer
from controlplane.errors import Conflict, Invalid, NotFound
from controlplane.models import Cluster, Generation, Lane, ModelCard, Run, ServedVersion
from controlplane.permissions import Action
from controlplane.selectors import api_lanes as select
from controlplane.selectors.api_runs import runs_of
from controlplane.services import lanes
from controlplane.services.consents import Withdrawal, consent_withdraw
from controlplane.services.erasures import user_erase
from controlplane.services.windows import lane_train
from rl_core.store import open_store

MAX_USER = 200


class LaneList(Post, ListView):
    """Lanes. POST creates one that serves its model as it is, on a serving cluster without a lane."""

    actions = {"GET": Action.READ, "POST": Action.LANES_MANAGE}
    serializer_class = LaneSerializer
    input_serializer = LaneInput

    def rows(self) -> QuerySet[Lane]:
        """Lanes."""
        return select.lanes_of(self.project)

    def perform(self, data: dict[str, Any]) -> Lane:
        """Create it."""
        cluster = one(Cluster.objects.filter(project=self.project), "cluster", slug=data.pop("cluster"))
        model = one(ModelCard.objects.filter(project=self.project), "model", slug=data.pop("model"))
        try:
            with transaction.atomic():
                lane = lanes.lane_create(project=self.project, cluster=cluster, model=model, actor=self.actor, **data)
        except IntegrityError as error:
            raise Conflict(f"there is a lane {data['slug']!r} already", "slug") from error
        return select.lanes_of(self.project).get(pk=lane.pk)


class OfLane:
    """Finds the lane of the path."""

    project: Any
    kwargs: Any

    def lane(self) -> Lane:
        """Raises: NotFound."""
        lane: Lane = one(select.lanes_of(self.project), "lane", slug=self.kwargs["slug"])
        return lane


class LaneDetail(OfLane, DetailView):
    """One lane."""

    serializer_class = LaneSerializer

    def row(self) -> Lane:
        """The lane of the path."""
        return self.lane()


class LaneServed(OfLane, ListView):
    """What the lane served, the newest first."""

    serializer_class = ServedSerializer

    def rows(self) -> QuerySet[ServedVersion]:
        """Served versions."""
        return select.served_of(self.lane())


class LaneServedAt(OfLane, DetailView):
    """Which version answered the lane's users at a time; with `user`, which one answered that user, canary included."""

    serializer_class = ServedSerializer
    query = frozenset({"at", "user"})
    documented = (
        OpenApiParameter("at", datetime, required=True, description="RFC 3339"),
        OpenApiParameter(
            "user", {"type": "string", "maxLength": MAX_USER}, description="the key sent as X-Slipway-User"
        ),
    )

    def row(self) -> ServedVersion:
        """The row that covers the time. Raises: NotFound before the lane's creation."""
        lane = self.lane()
        at = DateTimeField().run_validation(self.request.query_params.get("at", ""))
        user_key = self.request.query_params.get("user", "")
        if len(user_key) > MAX_USER or "\x00" in user_key:
            raise Invalid(f"a user key has at most {MAX_USER} characters", "user")
        served = lanes.lane_served_at(lane=lane, at=at, user_key=user_key)
        if served is None:
            raise NotFound("the lane served nothing then", "at")
        return served


class LaneTrain(OfLane, ActionView):
    """Train the promoted version on the lane's present window: creates a run."""

    actions = {"POST": Action.RUNS_CONTROL}
    serializer_class = RunSerializer
    input_serializer = TrainInput
    success_status = 201

    def perform(self, data: dict[str, Any]) -> Run:
        """Create the run."""
        run = lane_train(
            lane=self.lane(),
            name=data["name"],
            actor=self.actor,
            user=self.principal.user,
            overrides=data["stage"],
        )
        return runs_of(self.project).get(pk=run.pk)


class LaneErase(OfLane, ActionView):
    """Delete what is kept of one user's content; content-free tombstones stay."""

    actions = {"POST": Action.USERS_ERASE}
    serializer_class = ErasedSerializer
    input_serializer = EraseInput

    def perform(self, data: dict[str, Any]) -> dict[str, int]:
        """Erase."""
        count = user_erase(
            lane=self.lane(),
            user_key=data["user"],
            actor=self.actor,
            reason=data["reason"],
            store=open_store(settings.STORE_URL),
        )
        return {"generations": count}


class LaneWithdrawConsent(OfLane, ActionView):
    """End a user's consent: nothing of theirs is trained on from now on; says which versions were trained on it."""

    actions = {"POST": Action.FEEDBACK_RETRACT}
    serializer_class = WithdrawnSerializer
    input_serializer = WithdrawInput

    def perform(self, data: dict[str, Any]) -> Withdrawal:
        """Withdraw."""
        return consent_withdraw(lane=self.lane(), user_key=data["user"], actor=self.actor, reason=data["reason"])


class GenerationList(ListView):
    """What the lanes generated: metadata."""

    serializer_class = GenerationSerializer
    filterset_class = GenerationFilter

    def rows(self) -> QuerySet[Generation]:
        """Generations."""
        return select.generations_of(self.project)
