"""What the consumer asks the database: who is connected, what they may see, what is new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.db import close_old_connections
from django.utils.crypto import constant_time_compare

from controlplane.models import ApiKey, User
from controlplane.permissions import Action
from controlplane.principals import Principal
from controlplane.selectors.api_events import event_envelope, events_after, topic_find
from controlplane.services.tenancy import api_key_authenticate


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the client presented: a bearer key, or the cookie of a session."""

    token: str = ""
    session_key: str = ""

    @classmethod
    def of(cls, scope: Any) -> Credentials:
        """From the handshake."""
        header = dict(scope.get("headers", [])).get(b"authorization", b"").decode("latin1")
        scheme, _, token = header.partition(" ")
        if scheme.lower() == "bearer":
            return cls(token=token.strip())
        return cls(session_key=getattr(scope.get("session"), "session_key", None) or "")


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic that the caller may see."""

    seq: int


def principal_read(credentials: Credentials) -> Principal | None:
    """The caller as of now: None once the session ended, the user was disabled or the key revoked."""
    close_old_connections()
    if credentials.token:
        key: ApiKey | None = api_key_authenticate(token=credentials.token)
        return Principal(key=key) if key else None
    user = _session_user(credentials.session_key) if credentials.session_key else None
    return Principal(user=user) if user else None


def _session_user(session_key: str) -> User | None:
    session = SessionStore(session_key).load()
    if not session.get(SESSION_KEY) or not session.get(BACKEND_SESSION_KEY):
        return None
    user = User.objects.filter(pk=session[SESSION_KEY], is_active=True).first()
    if user is None or not constant_time_compare(session.get(HASH_SESSION_KEY, ""), user.get_session_auth_hash()):
        return None
    return user


def topic_read(principal: Principal, name: str) -> TopicState | None:
    """Where the topic stands; None when there is none that the caller may see."""
    close_old_connections()
    topic = topic_find(name)
    if topic is None or not principal.may(topic.project, Action.READ):
        return None
    return TopicState(topic.seq)


def page_read(principal: Principal, name: str, after: int, limit: int) -> list[dict[str, Any]] | None:
    """The next envelopes of a topic; None when the caller may no longer see it."""
    if topic_read(principal, name) is None:
        return None
    return [event_envelope(event) for event in events_after(topic=name, after=after, limit=limit)]
