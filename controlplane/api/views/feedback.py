"""Feedback: sent with a bearer key, read by members; signals, their map, and webhook sources."""

from __future__ import annotations

from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.base import ActionView, ApiView, ListView, Post, one
from controlplane.api.filters import FeedbackFilter
from controlplane.api.serializers.base import ReasonInput
from controlplane.api.serializers.lanes import (
    BatchReceiptSerializer,
    FeedbackBatchInput,
    FeedbackInput,
    FeedbackSerializer,
    ReceiptSerializer,
    RejectedSerializer,
    RetractionSerializer,
    SignalInput,
    SignalMapInput,
    SignalMapSerializer,
    SignalSerializer,
    SourceInput,
    SourceSecretSerializer,
    SourceSerializer,
)
from controlplane.errors import Conflict, ControlPlaneError, Invalid, TooLarge
from controlplane.models import Feedback, FeedbackSource, RejectedPayload, SignalDefinition, SignalMap
from controlplane.permissions import Action
from controlplane.selectors import api_lanes as select
from controlplane.services import feedback as service
from controlplane.services.signals import signal_define, signal_map_publish
from controlplane.services.sources import source_create, source_rotate
from controlplane.states import SignalType


class _Receiving(ApiView):
    """Shared by the two endpoints that products call. The project is the key's."""

    actions = {"POST": Action.FEEDBACK_SEND}
    filter_backends = ()
    pagination_class = None

    def sender(self) -> str:
        """Who sends: events are deduplicated within a sender."""
        key = self.principal.key
        return f"key:{key.pk}" if key is not None else f"user:{self.principal.identity}"

    def receive(self, data: Any) -> service.Receipt:
        """One event; a refused one is kept for replay. Raises: as feedback_receive."""
        try:
            return service.feedback_receive(
                project=self.project, sender=self.sender(), source=None, data=data, actor=self.actor
            )
        except ControlPlaneError as error:
            body = service.payload_text(data)
            service.payload_reject(project=self.project, sender=self.sender(), body=body, error=error, actor=self.actor)
            raise

    def bounded(self, request: Request, limit: int) -> Any:
        """The body, if it is not over the limit. Raises: TooLarge."""
        if int(request.headers.get("Content-Length") or 0) > limit:
            raise TooLarge(f"the body is over the limit of {limit} bytes")
        return request.data


class FeedbackReceive(_Receiving):
    """One event. 201 stored and joined, 202 stored and waiting for its generation, 200 the same event again."""

    input_serializer = FeedbackInput
    serializer_class = ReceiptSerializer
    success_statuses = (200, 201, 202)
    problems = frozenset({410})

    def post(self, request: Request, **kwargs: Any) -> Response:
        """Receive it."""
        receipt = self.receive(self.bounded(request, service.MAX_BODY_BYTES))
        return Response(receipt.body(), status=receipt.status)


class FeedbackBatch(_Receiving):
    """Up to 500 events, each with a result of its own."""

    input_serializer = FeedbackBatchInput
    serializer_class = BatchReceiptSerializer
    success_statuses = (207,)

    def post(self, request: Request, **kwargs: Any) -> Response:
        """Receive each."""
        data = self.bounded(request, service.MAX_BATCH_BYTES)
        items = data.get("items") if isinstance(data, dict) and set(data) == {"items"} else None
        if not isinstance(items, list) or not 1 <= len(items) <= service.MAX_BATCH_ITEMS:
            raise Invalid(f"send {{items: […]}} with 1 to {service.MAX_BATCH_ITEMS} events", "items")
        accepted, errors = [], []
        for index, item in enumerate(items):
            event_id = str(item.get("event_id"))[:100] if isinstance(item, dict) else None
            try:
                receipt = self.receive(item)
            except ControlPlaneError as error:
                errors.append(
                    {
                        "index": index,
                        "event_id": event_id,
                        "status": error.http_status,
                        "code": error.code,
                        "detail": error.message,
                        "field": error.field,
                    }
                )
            else:
                accepted.append({"index": index, "event_id": event_id, "status": receipt.status, **receipt.body()})
        return Response({"accepted": accepted, "errors": errors}, status=207)


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
        trained = service.feedback_retract(
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
        return service.payload_replay(row=row, actor=self.actor).body()


class SignalList(Post, ListView):
    """Signals that the project defines."""

    actions = {"GET": Action.READ, "POST": Action.RUBRICS_PUBLISH}
    serializer_class = SignalSerializer
    input_serializer = SignalInput

    def rows(self) -> QuerySet[SignalDefinition]:
        """Signals."""
        return select.signals_of(self.project)

    def perform(self, data: dict[str, Any]) -> SignalDefinition:
        """Define it."""
        kind = SignalType(data.pop("value_type"))
        try:
            with transaction.atomic():
                signal = signal_define(project=self.project, value_type=kind, **data)
        except IntegrityError as error:
            raise Conflict(f"there is a signal {data['slug']!r} already", "slug") from error
        signal.refresh_from_db()
        return signal


class SignalMapList(Post, ListView):
    """Versions of the map from signals to reward. POST publishes the next one."""

    actions = {"GET": Action.READ, "POST": Action.RUBRICS_PUBLISH}
    serializer_class = SignalMapSerializer
    input_serializer = SignalMapInput

    def rows(self) -> QuerySet[SignalMap]:
        """Maps."""
        return select.signal_maps_of(self.project)

    def perform(self, data: dict[str, Any]) -> SignalMap:
        """Publish."""
        published = signal_map_publish(
            project=self.project, content=data["content"], author=self.principal.user, actor=self.actor
        )
        published.refresh_from_db()
        return published


class SourceList(Post, ListView):
    """Webhook sources. POST creates one; its signing secret is shown once."""

    actions = {"GET": Action.READ, "POST": Action.LANES_MANAGE}
    serializer_class = SourceSerializer
    answer_serializer = SourceSecretSerializer
    input_serializer = SourceInput
    secret_fields = frozenset({"secret"})

    def rows(self) -> QuerySet[FeedbackSource]:
        """Sources."""
        return select.sources_of(self.project)

    def perform(self, data: dict[str, Any]) -> FeedbackSource:
        """Create it."""
        try:
            with transaction.atomic():
                source, secret = source_create(project=self.project, actor=self.actor, **data)
        except IntegrityError as error:
            raise Conflict(f"there is a source {data['slug']!r} already", "slug") from error
        return _with_secret(source, secret)


class SourceRotate(ActionView):
    """A fresh signing secret; the one before stays valid until the next rotation."""

    actions = {"POST": Action.LANES_MANAGE}
    serializer_class = SourceSecretSerializer
    input_serializer = ReasonInput
    secret_fields = frozenset({"secret"})

    def perform(self, data: dict[str, Any]) -> FeedbackSource:
        """Rotate."""
        source = one(select.sources_of(self.project), "source", slug=self.kwargs["slug"])
        return _with_secret(source, source_rotate(source=source, actor=self.actor))


def _with_secret(source: FeedbackSource, secret: str) -> FeedbackSource:
    source.refresh_from_db()
    source.secret = secret  # type: ignore[attr-defined]
    return source
