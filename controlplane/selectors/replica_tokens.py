"""What it takes to ask a replica: bearer tokens, in files for those that the operator runs, derived for those that
enrolled; and where the latter may be.

A replica that registered itself may run anywhere and be asked from any machine of the control plane, so its tokens
follow from the server's secret key, the replica's id and the number of its registration. They are told to it once, when
it registers; whoever registers the name after it is told others.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid
from enum import StrEnum

from django.conf import settings

from rl_core.destinations import Reach


class Listener(StrEnum):
    """Which of a replica's two listeners a token is for."""

    INFERENCE = "inference"
    CONTROL = "control"


def replica_token(replica_id: uuid.UUID, listener: Listener, *, enrolment: int | None) -> str:
    """What the listener asks for. Raises: OSError when it lies in a file that is not on this machine."""
    if enrolment is None:
        return (settings.REPLICA_TOKEN_DIR / f"{replica_id}.{listener.value}").read_text().strip()
    return _derived(replica_id, f"{listener.value}.{enrolment}" if enrolment else listener.value)


def peer_token(cluster_id: uuid.UUID) -> str:
    """What replicas of one cluster that registered themselves ask of each other for segments."""
    return _derived(cluster_id, "peer")


def enrolled_reach() -> Reach:
    """Where replicas that registered themselves may be, since they chose their URLs."""
    return Reach(settings.REPLICA_NETWORKS, "REPLICA_NETWORKS")


def replica_reach(enrolment: int | None) -> Reach | None:
    """Where the replica may be; None for one that the operator registered, whose URLs are trusted."""
    return None if enrolment is None else enrolled_reach()


def _derived(owner_id: uuid.UUID, purpose: str) -> str:
    secret = hashlib.sha256(f"slipway.replicas:{settings.SECRET_KEY}".encode()).digest()
    digest = hmac.new(secret, owner_id.bytes + purpose.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
