"""The inbox of refused payloads: kept after their sender was authenticated, bounded in number, bytes and age, replayed
through the full validation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import connection, transaction
from django.db.models.functions import Now

from controlplane.errors import ControlPlaneError, Throttled
from controlplane.models import FeedbackSource, Project, RejectedPayload
from controlplane.services.entries import Receipt, Sender
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.services.feedback import feedback_parse, feedback_receive_many
from controlplane.services.payloads import MAX_BODY_BYTES
from controlplane.services.product_events import consented, product_event_parse
from controlplane.states import EventType, PayloadKind

KEPT = 1000
KEPT_BYTES = 16 * 1024 * 1024
KEPT_FOR = timedelta(days=14)

_PARSERS = {PayloadKind.FEEDBACK: feedback_parse, PayloadKind.PRODUCT_EVENT: product_event_parse}
_TRIM = """
DELETE FROM controlplane_rejectedpayload WHERE id IN (
    SELECT id FROM (
        SELECT id, created_at, row_number() OVER newest AS place, sum(octet_length(body)) OVER newest AS bytes
        FROM controlplane_rejectedpayload WHERE project_id = %(project)s
        WINDOW newest AS (ORDER BY created_at DESC, id DESC)
    ) kept
    WHERE place > %(count)s OR bytes > %(bytes)s OR created_at < now() - %(age)s
)
"""


class Refused(NamedTuple):
    """A payload as it came, and why it was refused."""

    body: bytes
    error: ControlPlaneError


def payloads_reject(*, sender: Sender, kind: PayloadKind, refused: Sequence[Refused]) -> None:
    """Keep refused payloads of an authenticated sender, each cut to a bound; the oldest make room.

    What was over a rate limit is not kept: the same payload is welcome later.
    """
    kept = [one for one in refused if not isinstance(one.error, Throttled)]
    if not kept:
        return
    project = sender.project
    with transaction.atomic():
        rows = RejectedPayload.objects.bulk_create(
            RejectedPayload(
                project=project,
                sender=sender.name,
                kind=kind,
                body=_kept_text(kind, one.body),
                code=one.error.code,
                detail=_text(one.error.message.encode("utf-8", "replace"))[:1000],
            )
            for one in kept
        )
        trim(project)
        codes = dict(Counter(one.error.code for one in kept))
        told = {"payload": str(rows[0].id), "sender": sender.name, "code": kept[0].error.code}
        event_append(
            project_id=project.id,
            topic=project_topic(project.id),
            event_type=EventType.PAYLOAD_REJECTED,
            actor=sender.actor,
            data=told if len(rows) == 1 else {"count": len(rows), "sender": sender.name, "codes": codes},
        )


def _kept_text(kind: PayloadKind, body: bytes) -> str:
    """A product event holds what users wrote: without consent it is not kept, and cannot be replayed."""
    if kind is PayloadKind.PRODUCT_EVENT and not consented(body):
        return ""
    return _text(body)


def _text(body: bytes) -> str:
    return body[:MAX_BODY_BYTES].decode("utf-8", "replace").replace("\x00", "\ufffd")


def trim(project: Project) -> None:
    """Delete what is over the bounds of number, bytes and age."""
    bounds: dict[str, Any] = {"project": project.pk, "count": KEPT, "bytes": KEPT_BYTES, "age": KEPT_FOR}
    with connection.cursor() as cursor:
        cursor.execute(_TRIM, bounds)


def rejections_age() -> int:
    """Delete what is too old, of all projects. Returns how many."""
    deleted, _ = RejectedPayload.objects.filter(created_at__lt=Now() - KEPT_FOR).delete()
    return deleted


def payload_replay(*, row: RejectedPayload, actor: Actor) -> Receipt:
    """Send a kept payload through the full validation again. Rate limits do not hold a person up.

    Raises: as feedback_receive.
    """
    source = FeedbackSource.objects.filter(project=row.project, slug=row.sender).first()
    sender = Sender(row.project, row.sender, actor, source)
    parse = _PARSERS[PayloadKind(row.kind)]
    [outcome] = feedback_receive_many(sender=sender, items=[row.body.encode()], parse=parse, limited=False)
    if isinstance(outcome, ControlPlaneError):
        raise outcome
    RejectedPayload.objects.filter(id=row.id).update(replayed_at=Now())
    return outcome
