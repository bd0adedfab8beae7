"""What products send: feedback, one event or many, and product events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.base import ApiView
from controlplane.api.serializers.intake import (
    BatchReceiptSerializer,
    FeedbackBatchInput,
    FeedbackInput,
    ProductEventBatchInput,
    ReceiptSerializer,
)
from controlplane.api.wire import RawJSONParser
from controlplane.errors import ControlPlaneError, TooLarge
from controlplane.permissions import Action
from controlplane.services.entries import Outcome, Sender
from controlplane.services.feedback import Parse, feedback_parse, feedback_receive_many
from controlplane.services.gathering import feedback_gathered
from controlplane.services.payloads import MAX_BODY_BYTES, batch_items, event_id_of, payload_text, refused
from controlplane.services.product_events import product_event_parse
from controlplane.services.rejections import Refused, payloads_reject
from controlplane.states import PayloadKind


class _Receiving(ApiView):
    """Shared by the endpoints that products call. The project is the key's; a key may speak for a source."""

    actions = {"POST": Action.FEEDBACK_SEND}
    filter_backends = ()
    pagination_class = None
    parser_classes = [RawJSONParser]
    problems = frozenset({410, 429})

    def sender(self) -> Sender:
        """Who sends: events are deduplicated within a sender."""
        key = self.principal.key
        source = key.source if key is not None else None
        name = source.slug if source is not None else self.principal.identity
        return Sender(self.project, name, self.actor, source)

    def body(self, request: Request) -> bytes:
        """The body as it came; nothing at all is empty text."""
        data: object = request.data
        return data if isinstance(data, bytes) else b""


class FeedbackReceive(_Receiving):
    """One event. 201 stored and joined, 202 stored and waiting for its generation, 200 the same event again."""

    input_serializer = FeedbackInput
    serializer_class = ReceiptSerializer
    success_statuses = (200, 201, 202)

    def post(self, request: Request, **kwargs: Any) -> Response:
        """Receive it; a refused one is kept for replay."""
        body, sender = self.body(request), self.sender()
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"an event is at most {MAX_BODY_BYTES} bytes")
        outcome = feedback_gathered(sender=sender, body=body)
        if isinstance(outcome, ControlPlaneError):
            payloads_reject(sender=sender, kind=PayloadKind.FEEDBACK, refused=[Refused(body, outcome)])
            raise outcome
        return Response(msgspec.json.encode(outcome.body()), status=outcome.status)


class _Batch(_Receiving):
    """Up to 500 events, each with a result of its own."""

    serializer_class = BatchReceiptSerializer
    success_statuses = (207,)
    kind: PayloadKind
    parse: Parse

    def post(self, request: Request, **kwargs: Any) -> Response:
        """Receive each; the refused are kept for replay."""
        sender = self.sender()
        items = batch_items(self.body(request))
        outcomes = feedback_receive_many(sender=sender, items=items, parse=type(self).parse)
        bad = [Refused(payload_text(item), found) for item, found in _errors(items, outcomes)]
        payloads_reject(sender=sender, kind=self.kind, refused=bad)
        return Response(_answer(items, outcomes), status=207)


def _errors(items: Sequence[Any], outcomes: Sequence[Outcome]) -> list[tuple[Any, ControlPlaneError]]:
    pairs = zip(items, outcomes, strict=True)
    return [(item, outcome) for item, outcome in pairs if isinstance(outcome, ControlPlaneError)]


class _Accepted(msgspec.Struct):
    index: int
    event_id: str
    status: int
    id: str | None
    join: str
    duplicate: bool


def _answer(items: Sequence[Any], outcomes: Sequence[Outcome]) -> bytes:
    accepted: list[_Accepted] = []
    errors: list[dict[str, Any]] = []
    for index, (item, outcome) in enumerate(zip(items, outcomes, strict=True)):
        if isinstance(outcome, ControlPlaneError):
            errors.append({"index": index, "event_id": event_id_of(item), **refused(outcome)})
        else:
            accepted.append(
                _Accepted(index, outcome.event_id, outcome.status, outcome.feedback_id, outcome.join, outcome.duplicate)
            )
    return msgspec.json.encode({"accepted": accepted, "errors": errors})


class FeedbackBatch(_Batch):
    """Up to 500 events in 1 MB, each with a result of its own; what is new is stored together."""

    input_serializer = FeedbackBatchInput
    kind = PayloadKind.FEEDBACK
    parse = staticmethod(feedback_parse)


class ProductEvents(_Batch):
    """Up to 500 things that users did, each read as a signal by its detector, with a result of its own."""

    input_serializer = ProductEventBatchInput
    kind = PayloadKind.PRODUCT_EVENT
    parse = staticmethod(product_event_parse)
