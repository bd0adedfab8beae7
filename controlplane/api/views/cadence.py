"""A lane's cadence: read, set, paused, resumed; its slots run now or skipped; the lane rolled back."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.serializers.cadence import (
    CadenceInput,
    CadenceSerializer,
    CadenceSlotSerializer,
    LaneActionInput,
    LaneRollbackInput,
)
from controlplane.api.serializers.lanes import LaneSerializer
from controlplane.api.serializers.runs import SpecSchemaSerializer
from controlplane.api.views.lanes import OfLane
from controlplane.models import CadenceSlot, Lane, PolicyVersion
from controlplane.permissions import Action
from controlplane.selectors import api_lanes as select
from controlplane.selectors.cadence import cadence_state
from controlplane.services import cadence, promotions, slots
from rl_core.shipping.specs import cadence_schema


class CadenceSchema(DetailView):
    """The JSON Schema of a cadence."""

    serializer_class = SpecSchemaSerializer

    def get(self, request: Request, **kwargs: Any) -> Response:
        """The document."""
        return Response(cadence_schema())


class LaneCadence(OfLane, Post, DetailView):
    """The cadence and what it comes to. POST sets it; what is under way goes by the one that it began with."""

    actions = {"GET": Action.READ, "POST": Action.LANES_MANAGE}
    serializer_class = CadenceSerializer
    input_serializer = CadenceInput
    success_status = 200
    problems = frozenset({412})

    def row(self) -> dict[str, Any]:
        """The present state."""
        return cadence_state(self.lane())

    def perform(self, data: dict[str, Any]) -> dict[str, Any]:
        """Set it."""
        lane = cadence.cadence_update(
            lane=self.lane(),
            cadence=data["cadence"],
            actor=self.actor,
            reason=data["reason"],
            expected_revision=data["expected_revision"],
        )
        return cadence_state(lane)


class SlotList(OfLane, ListView):
    """Turns of the cadence, the newest first."""

    serializer_class = CadenceSlotSerializer

    def rows(self) -> QuerySet[CadenceSlot]:
        """Slots."""
        return select.slots_of(self.lane())


class _LaneAction(OfLane, ActionView):
    """A change of a lane's cadence; 409 where its state does not allow it, 412 where it moved since it was read."""

    actions = {"POST": Action.RELEASES_PROPOSE}
    serializer_class = CadenceSerializer
    input_serializer = LaneActionInput
    problems = frozenset({412})

    def perform(self, data: dict[str, Any]) -> dict[str, Any]:
        """Act, then read it again."""
        self.act(self.lane(), {"actor": self.actor, **data})
        return cadence_state(self.lane())

    def act(self, lane: Lane, data: dict[str, Any]) -> None:
        """Call the service."""
        raise NotImplementedError


class LanePause(_LaneAction):
    """Open no slot until it is resumed."""

    def act(self, lane: Lane, data: dict[str, Any]) -> None:
        """Pause."""
        cadence.cadence_pause(lane=lane, **data)


class LaneResume(_LaneAction):
    """Open slots again."""

    def act(self, lane: Lane, data: dict[str, Any]) -> None:
        """Resume."""
        cadence.cadence_resume(lane=lane, **data)


class LaneRunNow(_LaneAction):
    """Open a slot at once."""

    def act(self, lane: Lane, data: dict[str, Any]) -> None:
        """Open it."""
        slots.slot_run_now(lane=lane, **data)


class LaneSkip(_LaneAction):
    """End the slot under way, its run or release with it; or give up the next one's turn."""

    def act(self, lane: Lane, data: dict[str, Any]) -> None:
        """Skip it."""
        slots.slot_skip(lane=lane, **data)


class LaneRollback(OfLane, ActionView):
    """Let an earlier version answer again: at once when a replica holds it, else as soon as one has loaded it.

    Replicas with a second slot load it there while the present version goes on answering. Where no replica has one, the
    present version stops at once, and the gateway says 503 with Retry-After until the version is loaded in its place.
    """

    actions = {"POST": Action.RELEASES_ABORT}
    serializer_class = LaneSerializer
    input_serializer = LaneRollbackInput
    problems = frozenset({412})

    def perform(self, data: dict[str, Any]) -> Lane:
        """Roll back."""
        versions = PolicyVersion.objects.filter(lineage__project=self.project)
        version = one(versions, "version", pk=data.pop("version"))
        lane = promotions.lane_rollback(lane=self.lane(), version=version, actor=self.actor, **data)
        return select.lanes_of(self.project).get(pk=lane.pk)
