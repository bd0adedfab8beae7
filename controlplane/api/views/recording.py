"""What a lane keeps of its users' content: read, set."""

from __future__ import annotations

from typing import Any

from controlplane.api.base import DetailView, Post
from controlplane.api.serializers.recording import RecordingInput, RecordingSerializer
from controlplane.api.views.lanes import OfLane
from controlplane.models import Lane
from controlplane.permissions import Action
from controlplane.services.recording import recording_update


class LaneRecording(OfLane, Post, DetailView):
    """What the lane keeps of content. POST sets it for generations that end from then on."""

    actions = {"GET": Action.READ, "POST": Action.LANES_MANAGE}
    serializer_class = RecordingSerializer
    input_serializer = RecordingInput
    success_status = 200
    problems = frozenset({412})

    def row(self) -> Lane:
        """The lane of the path."""
        return self.lane()

    def perform(self, data: dict[str, Any]) -> Lane:
        """Set it."""
        return recording_update(lane=self.lane(), actor=self.actor, **data)
