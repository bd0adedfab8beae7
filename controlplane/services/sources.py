"""Webhook sources: their signing secrets, and the check of a Standard Webhooks signature."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time

from cryptography.fernet import Fernet
from django.conf import settings
from django.db import transaction
from django.db.models import F

from controlplane.errors import ControlPlaneError, NotFound
from controlplane.models import FeedbackSource, Project
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.states import EventType

LIVE_SECRETS = 2
TOLERANCE_S = 300


class BadSignature(ControlPlaneError):
    """The webhook is unsigned, wrongly signed, or too old."""

    code = "bad_signature"
    http_status = 401


def _cipher() -> Fernet:
    key = hashlib.sha256(b"slipway.sources:" + settings.SECRET_KEY.encode()).digest()
    return Fernet(base64.urlsafe_b64encode(key))


@transaction.atomic
def source_create(
    *, project: Project, slug: str, actor: Actor, trust_weight: float = 1.0
) -> tuple[FeedbackSource, str]:
    """Create a source with one secret, which is returned once (`whsec_…`)."""
    source = FeedbackSource.objects.create(project=project, slug=slug, trust_weight=trust_weight)
    return source, source_rotate(source=source, actor=actor)


@transaction.atomic
def source_rotate(*, source: FeedbackSource, actor: Actor) -> str:
    """Add a fresh secret and keep the newest older one live, so that senders can change over. Returns it once."""
    row = FeedbackSource.objects.select_for_update().get(id=source.id)
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    sealed = _cipher().encrypt(secret.encode()).decode()
    row.sealed_secrets = [sealed, *row.sealed_secrets][:LIVE_SECRETS]
    row.save(update_fields=["sealed_secrets"])
    event_append(
        project_id=row.project_id,
        topic=project_topic(row.project_id),
        event_type=EventType.SOURCE_CHANGED,
        actor=actor,
        data={"source": row.slug, "secrets": len(row.sealed_secrets)},
    )
    return secret


def source_authenticate(
    *, slug: str, message_id: str, timestamp: str, signature: str, body: bytes, now_s: float | None = None
) -> FeedbackSource:
    """The source whose secret signed `{id}.{timestamp}.{body}` (Standard Webhooks, `v1,` HMAC-SHA256).

    Raises: NotFound for an unknown source; BadSignature for anything else that is not a fresh, valid signature.
    """
    source = FeedbackSource.objects.select_related("project").filter(slug=slug).first()
    if source is None:
        raise NotFound("no such source")
    fresh = timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12
    fresh = fresh and abs((now_s or time.time()) - int(timestamp)) <= TOLERANCE_S
    if not (fresh and message_id and _signed(source, message_id, timestamp, signature, body)):
        FeedbackSource.objects.filter(id=source.id).update(unauthenticated_count=F("unauthenticated_count") + 1)
        raise BadSignature("the signature is missing, wrong or older than five minutes")
    return source


def _signed(source: FeedbackSource, message_id: str, timestamp: str, signature: str, body: bytes) -> bool:
    signed = f"{message_id}.{timestamp}.".encode("utf-8", "replace") + body
    offered = [part.split(",", 1)[1] for part in signature.split(" ") if part.startswith("v1,")]
    for sealed in source.sealed_secrets:
        secret = _cipher().decrypt(sealed.encode()).removeprefix(b"whsec_")
        expected = base64.b64encode(hmac.new(base64.b64decode(secret), signed, hashlib.sha256).digest())
        for candidate in offered:
            if hmac.compare_digest(expected, candidate.encode("utf-8", "replace")):
                return True
    return False
