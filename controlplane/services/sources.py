"""Sources of feedback: their secrets and keys, their trust and limits, and the check of a webhook's signature."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from controlplane.errors import ControlPlaneError, NotFound
from controlplane.models import ApiKey, FeedbackSource, Project, User
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.services.sealing import seal, signing_secret, unseal
from controlplane.services.tenancy import api_key_create
from controlplane.states import EventType, Scope
from rl_core import signing

LIVE_SECRETS = 2
PURPOSE = "sources"


class BadSignature(ControlPlaneError):
    """The webhook is unsigned, wrongly signed, or too old."""

    code = "bad_signature"
    http_status = 401


@transaction.atomic
def source_create(
    *,
    project: Project,
    slug: str,
    actor: Actor,
    trust_weight: float = 1.0,
    rate_per_minute: int | None = None,
    actor_rate_per_minute: int | None = None,
) -> tuple[FeedbackSource, str]:
    """Create a source with one secret, which is returned once (`whsec_…`)."""
    limits = {"rate_per_minute": rate_per_minute, "actor_rate_per_minute": actor_rate_per_minute}
    given = {name: value for name, value in limits.items() if value is not None}
    source = FeedbackSource.objects.create(project=project, slug=slug, trust_weight=trust_weight, **given)
    return source, source_rotate(source=source, actor=actor)


@transaction.atomic
def source_rotate(*, source: FeedbackSource, actor: Actor, reason: str = "") -> str:
    """Add a fresh secret and keep the newest older one live, so that senders can change over. Returns it once."""
    row = FeedbackSource.objects.select_for_update().get(id=source.id)
    secret = signing_secret()
    row.sealed_secrets = [seal(secret, purpose=PURPOSE), *row.sealed_secrets][:LIVE_SECRETS]
    row.save(update_fields=["sealed_secrets"])
    _record(row, actor, reason, secrets=len(row.sealed_secrets))
    return secret


@transaction.atomic
def source_configure(
    *,
    source: FeedbackSource,
    actor: Actor,
    reason: str = "",
    trust_weight: float | None = None,
    rate_per_minute: int | None = None,
    actor_rate_per_minute: int | None = None,
    disabled: bool | None = None,
) -> FeedbackSource:
    """Change what is given: trust, limits, or whether anything is taken of it (410 while it is disabled)."""
    row = FeedbackSource.objects.select_for_update().get(id=source.id)
    wanted: dict[str, Any] = {
        "trust_weight": trust_weight,
        "rate_per_minute": rate_per_minute,
        "actor_rate_per_minute": actor_rate_per_minute,
    }
    changes = {name: value for name, value in wanted.items() if value is not None and value != getattr(row, name)}
    told = {name: [getattr(row, name), value] for name, value in changes.items()}
    if disabled is not None and disabled != (row.disabled_at is not None):
        changes["disabled_at"] = Now() if disabled else None
        told["disabled"] = [not disabled, disabled]
    if changes:
        FeedbackSource.objects.filter(id=row.id).update(**changes)
        _record(row, actor, reason, changes=told)
        row.refresh_from_db()
    return row


@transaction.atomic
def source_key_create(
    *, source: FeedbackSource, name: str, actor: Actor, created_by: User | None
) -> tuple[ApiKey, str]:
    """Make a bearer key for feedback of this source, shown once. Revoke it as any other; several may live at once."""
    key, token = api_key_create(
        project=source.project, name=name, scopes=[Scope.FEEDBACK], actor=actor, created_by=created_by, source=source
    )
    _record(source, actor, "", key=str(key.id))
    return key, token


def source_authenticate(
    *, slug: str, message_id: str, timestamp: str, signature: str, body: bytes, now_s: float | None = None
) -> FeedbackSource:
    """The source whose secret signed `{id}.{timestamp}.{body}` (Standard Webhooks, `v1,` HMAC-SHA256).

    Raises: NotFound for an unknown source; BadSignature, which is counted and nothing more, for anything else that is
    not a fresh, valid signature.
    """
    source = FeedbackSource.objects.select_related("project").filter(slug=slug).first()
    if source is None:
        raise NotFound("no such source")
    headers = {signing.ID: message_id, signing.TIMESTAMP: timestamp, signing.SIGNATURE: signature}
    live = (unseal(sealed, purpose=PURPOSE) for sealed in source.sealed_secrets)
    if not signing.verified(live, headers, body, now_s=now_s):
        FeedbackSource.objects.filter(id=source.id).update(unauthenticated_count=F("unauthenticated_count") + 1)
        raise BadSignature("the signature is missing, wrong or older than five minutes")
    return source


def _record(source: FeedbackSource, actor: Actor, reason: str, **data: Any) -> None:
    event_append(
        project_id=source.project_id,
        topic=project_topic(source.project_id),
        event_type=EventType.SOURCE_CHANGED,
        actor=actor,
        reason=reason,
        data={"source": source.slug, **data},
    )
