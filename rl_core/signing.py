"""Signatures of HTTP messages, as Standard Webhooks says: `v1,` and HMAC-SHA256 over `{id}.{timestamp}.{body}`.

The standard library alone: what a customer runs beside their own code imports this too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
import uuid
from collections.abc import Iterable, Mapping

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
TOLERANCE_S = 300
PREFIX = "whsec_"


def sign(secret: str, body: bytes, *, message_id: str = "", now_s: float | None = None) -> dict[str, str]:
    """The three headers of a message. An answer is signed under the id of its request, which binds it to that.

    Raises: ValueError for a secret that is not `whsec_` and base64.
    """
    message_id = message_id or f"msg_{uuid.uuid4().hex}"
    timestamp = str(int(time.time() if now_s is None else now_s))
    digest = _digest(key_of(secret), message_id, timestamp, body)
    return {ID: message_id, TIMESTAMP: timestamp, SIGNATURE: f"v1,{digest}"}


def verified(secrets: Iterable[str], headers: Mapping[str, str], body: bytes, *, now_s: float | None = None) -> bool:
    """Whether any of the secrets signed this body freshly. Names of headers must be lower-case."""
    message_id, timestamp = headers.get(ID, ""), headers.get(TIMESTAMP, "")
    if not message_id or not fresh(timestamp, now_s=now_s):
        return False
    offered = [part[3:] for part in headers.get(SIGNATURE, "").split(" ") if part.startswith("v1,")]
    for secret in secrets:
        expected = _digest(key_of(secret), message_id, timestamp, body)
        if any(hmac.compare_digest(expected.encode(), one.encode("utf-8", "replace")) for one in offered):
            return True
    return False


def fresh(timestamp: str, *, now_s: float | None = None) -> bool:
    """Whether a timestamp is within five minutes of now."""
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        return False
    return abs((time.time() if now_s is None else now_s) - int(timestamp)) <= TOLERANCE_S


def key_of(secret: str) -> bytes:
    """The bytes of a secret as it is shown. Raises: ValueError."""
    try:
        key = base64.b64decode(secret.strip().removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("the secret is not base64 after whsec_") from error
    if len(key) < 16:
        raise ValueError("the secret has fewer than 16 bytes")
    return key


def _digest(key: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode("utf-8", "replace") + body
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
