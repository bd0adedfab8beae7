"""Feedback as it is shown: events, how they come in, and the payloads that were refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter

from controlplane.api.base import ActionView, DetailView, ListView, one
from controlplane.api.filters import FeedbackFilter
from controlplane.api.serializers.base import ReasonInput
from controlplane.api.serializers.feedback import (
    FeedbackHealthSerializer,
    FeedbackSerializer,
    RejectedSerializer,
    RetractionSerializer,
)
from controlplane.api.serializers.intake import ReceiptSerializer
from controlplane.errors import Invalid
from controlplane.models import Feedback, RejectedPayload
from controlplane.permissions import Action
from controlplane.selectors import api_lanes as select
from controlplane.selectors.feedback_health import feedback_health
from controlplane.services.rejections import payload_replay
from controlplane.services.retractions import feedback_retract

MAX_HOURS = 24 * 90


class FeedbackList(ListView):
    """Feedback events, the newest first."""

    serializer_class = FeedbackSerializer
    filterset_class = FeedbackFilter

    def rows(self) -> QuerySet[Feedback]:
        """Feedback."""
        return select.feedback_of(self.project)


class FeedbackRetract(ActionView):
    """Withdraw an event: a tombstone stays, and the versions that were trained on its generation are named."""

    actions = {"POST": Action.FEEDBACK_RETRACT}
    serializer_class = RetractionSerializer
    input_serializer = ReasonInput
    problems = frozenset({410})

    def perform(self, data: dict[str, Any]) -> dict[str, Any]:
        """Retract."""
        trained = feedback_retract(
            project=self.project, feedback_id=self.kwargs["id"], actor=self.actor, reason=data["reason"]
        )
        return {"id": self.kwargs["id"], "trained_versions": trained}


class RejectedList(ListView):
    """Payloads that were refused after their sender was authenticated."""

    serializer_class = RejectedSerializer

    def rows(self) -> QuerySet[RejectedPayload]:
        """Rejected payloads."""
        return select.rejected_of(self.project)


class RejectedReplay(ActionView):
    """Send a kept payload through the full validation again."""

    actions = {"POST": Action.WORK_REPLAY}
    serializer_class = ReceiptSerializer
    input_serializer = ReasonInput
    problems = frozenset({410})

    def perform(self, data: dict[str, Any]) -> dict[str, Any]:
        """Replay."""
        row = one(select.rejected_of(self.project), "payload", pk=self.kwargs["id"])
        return payload_replay(row=row, actor=self.actor).body()


class FeedbackHealth(DetailView):
    """How well feedback comes in: what finds its generation, what comes twice, how late; by sender."""

    serializer_class = FeedbackHealthSerializer
    query = frozenset({"hours"})
    documented = (
        OpenApiParameter(
            "hours",
            {"type": "integer", "minimum": 1, "maximum": MAX_HOURS, "default": 168},
            description="how far to look back",
        ),
    )

    def row(self) -> dict[str, Any]:
        """Look back. Raises: Invalid."""
        hours = self.request.query_params.get("hours", "168")
        if not (hours.isascii() and hours.isdigit() and 1 <= int(hours[:9]) <= MAX_HOURS):
            raise Invalid(f"hours is a whole number from 1 to {MAX_HOURS}", "hours")
        health = feedback_health(self.project, back=timedelta(hours=int(hours)))
        senders = [
            {
                "sender": name,
                "received": intake.received,
                "repeats": intake.repeats,
                "states": intake.states,
                "orphan_rate": intake.orphan_rate,
                "late_rate": intake.late_rate,
                "duplicate_rate": intake.duplicate_rate,
            }
            for name, intake in health.by_sender.items()
        ]
        return {"total": health.total, "senders": senders, "delays": health.delays}
