"""Sessions of remote environments: opened with a key of their own, reported once, ended; and the calls they make."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Q, Sum, Value
from django.db.models.functions import Coalesce, Now

from controlplane.errors import Conflict, Gone, NotFound
from controlplane.models import RemoteEnvironment, RolloutCall, RolloutSession
from controlplane.services.blobs import blob_put
from controlplane.services.work import Claim, work_fenced
from rl_core.environments.remote.capture import NOWHERE, Captured
from rl_core.environments.remote.messages import Result
from rl_core.session_specs import Limits
from rl_core.store import ObjectStore

KEY_PREFIX: Final = "slwr"


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session that a worker watches over."""

    id: uuid.UUID
    accepted: bool


@dataclass(frozen=True, slots=True)
class SessionStanding:
    """What became of a session. `result` None and `ended`: it has none."""

    ended: bool
    expired: bool
    result: Result | None
    reason: str
    calls: int


def session_key(session_id: uuid.UUID) -> str:
    """The bearer key of a session. It is derived, not kept: what is kept is its digest."""
    secret = hashlib.sha256(f"slipway.rollout_sessions:{settings.SECRET_KEY}".encode()).digest()
    digest = hmac.new(secret, session_id.bytes, hashlib.sha256).digest()
    return f"{KEY_PREFIX}_{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def key_digest(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def rollout_session_open(claim: Claim, *, rollout_id: uuid.UUID, slug: str) -> OpenSession:
    """The rollout's session that was not given up, or a new one with a key of its own. Raises: StaleFence; NotFound."""
    with work_fenced(claim):
        session = RolloutSession.objects.filter(rollout=rollout_id, reason="").order_by("-created_at").first()
        if session is None:
            environment = RemoteEnvironment.objects.filter(project=claim.project_id, slug=slug).first()
            if environment is None:
                raise NotFound(f"there is no remote environment {slug!r} in this project")
            session = RolloutSession(rollout_id=rollout_id, environment=environment)
            session.digest = key_digest(session_key(session.pk))
            session.deadline_at = Now() + Value(timedelta(seconds=environment.session_s))
            session.save()
    return OpenSession(session.pk, session.accepted_at is not None)


def rollout_session_accepted(session_id: uuid.UUID, *, session_s: float) -> None:
    """The environment said that it plays the session: its time begins now."""
    waiting = RolloutSession.objects.filter(pk=session_id, accepted_at__isnull=True)
    waiting.update(accepted_at=Now(), deadline_at=Now() + Value(timedelta(seconds=session_s)))


def rollout_session_standing(session_id: uuid.UUID) -> SessionStanding:
    """Where a session stands now."""
    rows = RolloutSession.objects.annotate(expired=Q(deadline_at__lte=Now()))
    session = rows.get(pk=session_id)
    return SessionStanding(
        ended=session.ended_at is not None,
        expired=session.expired,
        result=None if session.result is None else msgspec.convert(session.result, Result),
        reason=session.reason,
        calls=session.calls.count(),
    )


@transaction.atomic
def rollout_session_report(*, session_id: uuid.UUID, result: Result) -> bool:
    """The session's result, which ends it and its key; whether it is new. The same result again changes nothing.

    Raises: NotFound; Conflict for another result than the first; Gone when the session ended without one.
    """
    session = RolloutSession.objects.select_for_update().filter(pk=session_id).first()
    if session is None:
        raise NotFound("there is no such session")
    told = _plain(result)
    if session.ended_at is None:
        RolloutSession.objects.filter(pk=session_id).update(result=told, ended_at=Now())
        return True
    if session.result is None:
        raise Gone("the session has ended without a result: nobody waits for one")
    if session.result != told:
        raise Conflict("the session has another result already")
    return False


def rollout_session_end(*, session_id: uuid.UUID, reason: str, claim: Claim | None = None) -> bool:
    """Give a session up, and its key with it; whether it was not given up before. The rollout's next is another.

    Raises: StaleFence for a worker whose claim is not the newest: another one watches over the session.
    """
    with work_fenced(claim) if claim is not None else contextlib.nullcontext():
        kept = RolloutSession.objects.filter(pk=session_id, reason="")
        return bool(kept.update(ended_at=Coalesce("ended_at", Now()), reason=reason[:500]))


@dataclass(frozen=True, slots=True)
class CallStanding:
    """What a call meets: how much was asked before, what it repeats, and what it goes on from."""

    calls: int
    sampled_tokens: int
    repeats: RolloutCall | None
    parent: RolloutCall | None


def call_standing(
    *, session_id: uuid.UUID, request: str, mark: str, repeated: bool, contexts: Sequence[str]
) -> CallStanding:
    """Look up a call before it is made. `contexts` are the beginnings that it may go on from, the longest first.

    Raises: Conflict when the client's mark is another request's.
    """
    calls = RolloutCall.objects.filter(session=session_id)
    told = calls.aggregate(sampled=Sum("sampled_tokens"))
    found = {row.context: row for row in calls.filter(context__in=contexts).order_by("number")}
    parent = next((found[context] for context in contexts if context in found), None)
    repeats = _repeated(session_id, request=request, mark=mark, repeated=repeated)
    return CallStanding(calls.count(), told["sampled"] or 0, repeats, parent)


def call_record(
    *,
    session_id: uuid.UUID,
    limits: Limits,
    call_id: uuid.UUID,
    captured: Captured,
    parent: RolloutCall | None,
    request: str,
    mark: str,
    repeated: bool,
    context: str,
    store: ObjectStore,
) -> RolloutCall:
    """Write an answered call down, once: where a repeat was faster, that one is returned and this one is not kept.

    Raises: Gone when the session ended meanwhile, or calls beside this one reached a limit of the rollout.
    """
    with transaction.atomic():
        session = RolloutSession.objects.select_for_update().filter(pk=session_id, ended_at__isnull=True).first()
        if session is None:
            raise Gone("the session has ended: its key is good for nothing any more")
        before = _repeated(session_id, request=request, mark=mark, repeated=repeated)
        if before is not None:
            return before
        told = session.calls.aggregate(calls=Count("pk"), sampled=Coalesce(Sum("sampled_tokens"), 0))
        sampled = told["sampled"] + len(captured.generated.token_ids)
        if told["calls"] >= limits.max_turns or 0 < limits.max_sampled_tokens < sampled:
            raise Gone("the rollout's other calls have reached its limits meanwhile: this one does not count")
        captured.number = told["calls"]
        captured.parent = parent.number if parent is not None else NOWHERE
        return RolloutCall.objects.create(
            pk=call_id,
            session=session,
            number=captured.number,
            request=request,
            mark=mark,
            context=context,
            blob_key=blob_put(store, captured.to_bytes()),
            sampled_tokens=len(captured.generated.token_ids),
        )


def calls_of(session_id: uuid.UUID, store: ObjectStore, *, since: int = 0) -> list[Captured]:
    """The answered calls of a session from number `since` on, in order. Raises: StoreError, TrajectoryError."""
    calls = RolloutCall.objects.filter(session=session_id, number__gte=since).order_by("number")
    return [Captured.from_bytes(store.get_blob(key)) for key in calls.values_list("blob_key", flat=True)]


def _repeated(session_id: uuid.UUID, *, request: str, mark: str, repeated: bool) -> RolloutCall | None:
    """The call that this one is a repeat of, by the client's own word. Raises: Conflict."""
    calls = RolloutCall.objects.filter(session=session_id).order_by("-number")
    if mark:
        marked = calls.filter(mark=mark).first()
        if marked is not None and marked.request != request:
            raise Conflict("this Idempotency-Key was another request's; take a new one")
        return marked
    return calls.filter(request=request).first() if repeated else None


def _plain(result: Result) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(result))
    return plain
