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
from controlplane.api.filters import GenerationFilter, ReleaseFilter
from controlplane.api.serializers.lanes import (
    ErasedSerializer,
    EraseInput,
    GenerationSerializer,
    LaneInput,
    LaneSerializer,
    ProposeInput,
    ReleaseActionInput,
    ReleaseSerializer,
    ServedSerializer,
    TrainInput,
)
from controlplane.api.serializers.runs import RunSerializer
from controlplane.errors import Conflict, Forbidden, Invalid, NotFound
from controlplane.models import Cluster, Generation, Lane, ModelCard, Release, Run, ServedVersion
from controlplane.permissions import Action
from controlplane.selectors import api_lanes as select
from controlplane.selectors.api_runs import runs_of
from controlplane.services import lanes, promotions, releases
from controlplane.services.erasures import user_erase
from controlplane.services.windows import lane_train
from rl_core.store.object_store import open_store


class LaneList(Post, ListView):
    """Lanes. POST creates one that serves its model as it is."""

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


class _OfLane:
    """Finds the lane of the path."""

    project: Any
    kwargs: Any

    def lane(self) -> Lane:
        """Raises: NotFound."""
        lane: Lane = one(select.lanes_of(self.project), "lane", slug=self.kwargs["slug"])
        return lane


class LaneDetail(_OfLane, DetailView):
    """One lane."""

    serializer_class = LaneSerializer

    def row(self) -> Lane:
        """The lane of the path."""
        return self.lane()


class LaneServed(_OfLane, ListView):
    """What the lane served, the newest first."""

    serializer_class = ServedSerializer

    def rows(self) -> QuerySet[ServedVersion]:
        """Served versions."""
        return select.served_of(self.lane())


class LaneServedAt(_OfLane, DetailView):
    """Which version answered the lane's users at a time."""

    serializer_class = ServedSerializer
    query = frozenset({"at"})
    documented = (OpenApiParameter("at", datetime, required=True, description="RFC 3339"),)

    def row(self) -> ServedVersion:
        """The row that covers the time. Raises: NotFound before the lane's creation."""
        lane = self.lane()
        at = DateTimeField().run_validation(self.request.query_params.get("at", ""))
        served = lanes.lane_served_at(lane=lane, at=at)
        if served is None:
            raise NotFound("the lane served nothing then", "at")
        return served


class LaneTrain(_OfLane, ActionView):
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


class LaneErase(_OfLane, ActionView):
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


class GenerationList(ListView):
    """What the lanes generated: metadata."""

    serializer_class = GenerationSerializer
    filterset_class = GenerationFilter

    def rows(self) -> QuerySet[Generation]:
        """Generations."""
        return select.generations_of(self.project)


class ReleaseList(Post, ListView):
    """Releases. POST proposes the head of a run."""

    actions = {"GET": Action.READ, "POST": Action.RELEASES_PROPOSE}
    serializer_class = ReleaseSerializer
    input_serializer = ProposeInput
    filterset_class = ReleaseFilter

    def rows(self) -> QuerySet[Release]:
        """Releases."""
        return select.releases_of(self.project)

    def perform(self, data: dict[str, Any]) -> Release:
        """Propose."""
        lane = one(select.lanes_of(self.project), "lane", slug=data["lane"])
        run = one(runs_of(self.project), "run", pk=data["run"])
        if run.lineage.head is None:
            raise Invalid("the run has no version yet", "run")
        release = releases.release_propose(
            lane=lane,
            version=run.lineage.head,
            run=run,
            proposer=self.principal.user,
            actor=self.actor,
            reason=data["reason"],
        )
        return select.releases_of(self.project).get(pk=release.pk)


class ReleaseDetail(DetailView):
    """One release."""

    serializer_class = ReleaseSerializer

    def row(self) -> Release:
        """The release of the path."""
        release: Release = one(select.releases_of(self.project), "release", pk=self.kwargs["id"])
        return release


class _ReleaseAction(ActionView):
    """A change of a release; 409 where its state does not allow it, 412 where it moved since it was read."""

    actions = {"POST": Action.RELEASES_ABORT}
    serializer_class = ReleaseSerializer
    input_serializer = ReleaseActionInput
    problems = frozenset({412})

    def perform(self, data: dict[str, Any]) -> Release:
        """Act, then read it again."""
        release = one(select.releases_of(self.project), "release", pk=self.kwargs["id"])
        self.act(release, data)
        return select.releases_of(self.project).get(pk=release.pk)

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Call the service."""
        raise NotImplementedError


class ReleaseApprove(_ReleaseAction):
    """One person's word for it: not the proposer's."""

    actions = {"POST": Action.RELEASES_APPROVE}

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Approve."""
        if self.principal.user is None:
            raise Forbidden("an approval is a person's word: log in")
        releases.release_approve(release=release, user=self.principal.user, actor=self.actor, reason=data["reason"])


class ReleasePromote(_ReleaseAction):
    """Let the candidate answer users."""

    actions = {"POST": Action.RELEASES_APPROVE}

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Promote."""
        promotions.release_promote(
            release=release, actor=self.actor, reason=data["reason"], expected_revision=data["expected_revision"]
        )


class ReleaseAbort(_ReleaseAction):
    """End a release in flight."""

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Skip it."""
        releases.release_end(
            release=release, actor=self.actor, reason=data["reason"], expected_revision=data["expected_revision"]
        )


class ReleaseRollback(_ReleaseAction):
    """Let the incumbent answer again; the bad version's feedback is quarantined."""

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Roll back."""
        promotions.release_rollback(release=release, actor=self.actor, reason=data["reason"])
