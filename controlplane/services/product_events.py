"""Product events: what a user did, read as a signal by its detector, and from there on feedback like any other."""

from __future__ import annotations

from typing import Any

import msgspec
from django.db import transaction

from controlplane.errors import Invalid
from controlplane.models import Project, SignalDefinition
from controlplane.services.payloads import FeedbackPayload, Sent, payload_parse
from controlplane.services.signals import signal_define
from controlplane.states import Consent, SignalType
from rl_core.errors import SignalError
from rl_core.signals.product import DETECTORS, ProductEvent, ValueKind, detect


class ProductEventPayload(Sent, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of one product event. Its `event` is looked at and forgotten; the signal's value alone is kept."""

    event: ProductEvent


_PAYLOAD = msgspec.json.Decoder(ProductEventPayload)
_TYPES = {ValueKind.BOOLEAN: SignalType.BOOLEAN, ValueKind.NUMBER: SignalType.NUMBER}


def product_event_parse(data: Any) -> FeedbackPayload:
    """One product event as the feedback that it amounts to. Raises: Malformed; Invalid, also when it says nothing."""
    payload = payload_parse(data, _PAYLOAD)
    try:
        detector, value = detect(payload.event)
    except SignalError as error:
        raise Invalid(f"the event cannot be read: {error}", field="event") from error
    if value is None:
        raise Invalid("the event says nothing: what was compared is equal", field="event")
    return FeedbackPayload(
        event_id=payload.event_id,
        target=payload.target,
        occurred_at=payload.occurred_at,
        actor=payload.actor,
        tags=payload.tags,
        consent=payload.consent,
        dry_run=payload.dry_run,
        signal=detector.signal,
        value=value,
    )


class _Consent(msgspec.Struct):
    consent: str = Consent.NONE


def consented(body: bytes) -> bool:
    """Whether a body, however wrong otherwise, says that its user consents to more than metadata."""
    try:
        return msgspec.json.decode(body, type=_Consent).consent in (Consent.EVAL, Consent.TRAIN)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


@transaction.atomic
def detected_signals_define(*, project: Project) -> list[SignalDefinition]:
    """Define the signals of all detectors, those that are missing; returns all of them.

    Raises: Invalid when one of the names is taken by a signal of another type or range.
    """
    present = {row.slug: row for row in SignalDefinition.objects.filter(project=project)}
    defined = []
    for detector in DETECTORS.values():
        wanted = _TYPES[detector.value]
        ranged = (detector.minimum, detector.maximum) if wanted == SignalType.NUMBER else (None, None)
        row = present.get(detector.signal) or signal_define(
            project=project, slug=detector.signal, value_type=wanted, minimum=ranged[0], maximum=ranged[1]
        )
        if (row.value_type, row.minimum, row.maximum) != (wanted, *ranged):
            raise Invalid(f"signal {row.slug} is defined with another type or range than its detector's", "slug")
        defined.append(row)
    return defined
