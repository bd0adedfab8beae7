"""Projects, people, roles and API keys."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid, NotFound
from controlplane.models import ApiKey, FeedbackSource, Membership, Project, User
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.states import Consent, EventType, MemberRole, Scope

KEY_PREFIX = "slw"
LAST_USED_GRAIN = timedelta(minutes=1)  # how stale `last_used_at` may be: one write a minute, not one a request


def project_create(
    *, slug: str, name: str, actor: Actor, owner: User | None = None, consent: Consent = Consent.TRAIN
) -> Project:
    """Open a project, with its first owner when one is given. Raises: Conflict when the slug is taken."""
    try:
        with transaction.atomic():
            project = Project.objects.create(slug=slug, name=name, consent=consent)
            project.refresh_from_db()
            _record(project, EventType.PROJECT_CREATED, actor, {"slug": slug, "name": name, "consent": consent.value})
            if owner is not None:
                membership_set(project=project, user=owner, role=MemberRole.OWNER, actor=actor)
    except IntegrityError as error:
        raise Conflict(f"there is a project {slug} already; choose another slug", "slug") from error
    return project


def user_create(
    *, project: Project, username: str, password: str, role: MemberRole, actor: Actor, email: str = ""
) -> User:
    """Create a login and make it a member of the project.

    Raises: Conflict when the name is taken, Invalid for a weak password or a name with other characters.
    """
    user = User(username=username, email=email)
    try:
        User.username_validator(username)
        validate_password(password, user)
    except ValidationError as error:
        field = "username" if getattr(error, "code", "") == "invalid" else "password"
        raise Invalid(" ".join(error.messages), field) from error
    user.set_password(password)
    try:
        with transaction.atomic():
            user.save(force_insert=True)
            membership_set(project=project, user=user, role=role, actor=actor)
    except IntegrityError as error:
        raise Conflict(f"there is a user {username} already; add them as a member instead", "username") from error
    return user


def membership_set(*, project: Project, user: User, role: MemberRole, actor: Actor, reason: str = "") -> Membership:
    """Give a user a role in the project, or another role than before; the same role again changes nothing.

    Raises: Conflict when the project would be left without an owner.
    """
    with transaction.atomic():
        Project.objects.select_for_update().get(pk=project.pk)
        present = Membership.objects.filter(project=project, user=user).first()
        before = present.role if present else None
        if present is not None and before == role:
            return present
        if present is None:
            present = Membership.objects.create(project=project, user=user, role=role)
            present.refresh_from_db()
        else:
            _keep_an_owner(project, leaving=present)
            present.role = role
            present.save(update_fields=["role"])
        data = {"user": user.username, "before": before, "role": role.value}
        _record(project, EventType.MEMBER_CHANGED, actor, data, reason)
    return present


def membership_remove(*, membership: Membership, actor: Actor, reason: str = "") -> None:
    """Take a user out of the project. Raises: Conflict when they are its last owner."""
    with transaction.atomic():
        project = Project.objects.select_for_update().get(pk=membership.project_id)
        _keep_an_owner(project, leaving=membership)
        deleted, _ = Membership.objects.filter(pk=membership.pk).delete()
        if not deleted:
            raise NotFound("the membership is gone already")
        data = {"user": membership.user.username, "before": membership.role, "role": None}
        _record(project, EventType.MEMBER_CHANGED, actor, data, reason)


def api_key_create(
    *,
    project: Project,
    name: str,
    scopes: Iterable[Scope],
    actor: Actor,
    created_by: User | None = None,
    expires_at: datetime | None = None,
    source: FeedbackSource | None = None,
) -> tuple[ApiKey, str]:
    """Make a key and return it with its secret text, which is shown this once and kept nowhere.

    Feedback under a key with a source is that source's. Raises: Invalid without a scope.
    """
    wanted = sorted({Scope(scope).value for scope in scopes})
    if not wanted:
        raise Invalid("a key needs at least one scope", "scopes")
    prefix = secrets.token_hex(4)
    token = f"{KEY_PREFIX}_{prefix}_{secrets.token_urlsafe(32)}"
    with transaction.atomic():
        key = ApiKey.objects.create(
            project=project,
            name=name,
            prefix=prefix,
            digest=_digest(token),
            scopes=wanted,
            created_by=created_by,
            expires_at=expires_at,
            source=source,
        )
        key.refresh_from_db()
        _record(project, EventType.KEY_CREATED, actor, {"key": str(key.id), "name": name, "scopes": wanted})
    return key, token


def api_key_revoke(*, key: ApiKey, actor: Actor, reason: str = "") -> ApiKey:
    """End a key at once; revoking it again changes nothing."""
    with transaction.atomic():
        revoked = ApiKey.objects.filter(pk=key.pk, revoked_at__isnull=True).update(revoked_at=Now())
        if revoked:
            _record(key.project, EventType.KEY_REVOKED, actor, {"key": str(key.id), "name": key.name}, reason)
    key.refresh_from_db()
    return key


def api_key_authenticate(*, token: str) -> ApiKey | None:
    """The live key of this text, or None for one that is unknown, expired or revoked.

    The index finds the row by digest; the digest of 256 random bits tells a timer nothing about the key, and the
    comparison that decides takes constant time.
    """
    digest = _digest(token)
    live = Q(expires_at__isnull=True) | Q(expires_at__gt=Now())
    rows = ApiKey.objects.filter(live, digest=digest, revoked_at__isnull=True).select_related("project", "source")
    key = rows.annotate(stale=Q(last_used_at__isnull=True) | Q(last_used_at__lt=Now() - LAST_USED_GRAIN)).first()
    if key is None or not hmac.compare_digest(key.digest, digest):
        return None
    if key.stale:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=Now())
    return key


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _keep_an_owner(project: Project, *, leaving: Membership) -> None:
    """Called under the project's lock."""
    if leaving.role != MemberRole.OWNER:
        return
    others = Membership.objects.filter(project=project, role=MemberRole.OWNER).exclude(pk=leaving.pk)
    if not others.exists():
        raise Conflict("this is the project's last owner; make another member owner first", "role")


def _record(project: Project, event_type: EventType, actor: Actor, data: dict[str, Any], reason: str = "") -> None:
    event_append(
        project_id=project.pk,
        topic=project_topic(project.pk),
        event_type=event_type,
        actor=actor,
        data=data,
        reason=reason,
    )
