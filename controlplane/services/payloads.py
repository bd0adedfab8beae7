"""What senders of feedback send: shape and bounds, checked before anything else looks at it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from controlplane.errors import ControlPlaneError, Invalid, Malformed, TooLarge

MAX_BODY_BYTES = 64 * 1024
MAX_BATCH_BYTES = 1024 * 1024
MAX_BATCH_ITEMS = 500
CLOCK_SKEW = timedelta(minutes=5)
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)

Zoned = Annotated[datetime, Meta(tz=True)]
ConsentName = Literal["train", "eval", "none"]
Tags = Annotated[
    dict[Annotated[str, Meta(max_length=100)], Annotated[str, Meta(max_length=200)]],
    Meta(max_length=20),
]
Payload = TypeVar("Payload", bound="Sent")


class FeedbackTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the feedback is about. `episode` is the session key, `message` the generation that wrote it."""

    kind: Literal["generation", "episode", "message"]
    id: Annotated[str, Meta(min_length=1, max_length=200)]


class FeedbackActor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who gave it, as the sender hashes its users."""

    hash: Annotated[str, Meta(max_length=64)] = ""
    kind: Literal["user", "expert", "system"] = "user"


class Sent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every event carries."""

    event_id: uuid.UUID
    target: FeedbackTarget
    occurred_at: Zoned
    actor: FeedbackActor = FeedbackActor()
    tags: Tags = {}
    consent: ConsentName = "none"
    dry_run: bool = False


class FeedbackPayload(Sent, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of one feedback event."""

    signal: Annotated[str, Meta(max_length=64)]
    value: bool | int | float | str | None = None
    comment: Annotated[str, Meta(max_length=10_000)] = ""
    demonstration: Annotated[str, Meta(max_length=40_000)] | None = None


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    items: list[msgspec.Raw]


_BATCH = msgspec.json.Decoder(_Batch)
_FIELD = re.compile(r"`\$\.(.*)`$")


def batch_items(body: bytes) -> Sequence[Any]:
    """The items of a batch, each as it was sent, to be parsed apart from the others.

    What spoils one item alone, such as half of a surrogate pair, does not spoil the batch.

    Raises: TooLarge (413), Malformed (400), Invalid (422).
    """
    if len(body) > MAX_BATCH_BYTES:
        raise TooLarge(f"a batch is at most {MAX_BATCH_BYTES} bytes; send it in parts")
    try:
        items: Sequence[Any] = [bytes(raw) for raw in _BATCH.decode(body).items]
    except msgspec.ValidationError as error:
        raise Invalid(f"send {{items: […]}} with 1 to {MAX_BATCH_ITEMS} events: {error}", "items") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        items = _lenient_items(body)
    if not 1 <= len(items) <= MAX_BATCH_ITEMS:
        raise Invalid(f"send 1 to {MAX_BATCH_ITEMS} events, not {len(items)}", "items")
    return items


def _lenient_items(body: bytes) -> list[Any]:
    try:
        data = json.loads(body.decode("utf-8", "surrogateescape"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {str(error)[:200]}") from error
    items = data.get("items") if isinstance(data, dict) and set(data) == {"items"} else None
    if not isinstance(items, list):
        raise Invalid(f"send {{items: […]}} with 1 to {MAX_BATCH_ITEMS} events", "items")
    return items


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def payload_parse(data: Any, decoder: msgspec.json.Decoder[Payload]) -> Payload:
    """One event, from the bytes that were sent or from parsed JSON. Raises: Malformed, Invalid, naming the field."""
    payload = _decode(data, decoder)
    if payload.occurred_at > datetime.now(UTC) + CLOCK_SKEW:
        raise Invalid("occurred_at lies in the future", field="occurred_at")
    if payload.occurred_at < EARLIEST:
        raise Invalid(f"occurred_at lies before {EARLIEST:%Y}", field="occurred_at")
    return payload


def _decode(data: Any, decoder: msgspec.json.Decoder[Payload]) -> Payload:
    try:
        if isinstance(data, bytes):
            payload = decoder.decode(data)
            if b"\\u0000" in data:  # the only way in for a NUL
                _refuse_unstorable(msgspec.to_builtins(payload))
            return payload
        _refuse_unstorable(data)
        converted: Payload = msgspec.convert(data, type=decoder.type)
        return converted
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        raise Invalid(f"the event is not valid: {error}", field=found[1] if found else "") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the event is not JSON: {str(error)[:200]}") from error


def _refuse_unstorable(data: Any) -> None:
    """PostgreSQL stores no NUL, and a lone surrogate is no text."""
    pending = [data]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            if "\x00" in value or any("\ud800" <= character <= "\udfff" for character in value):
                raise Invalid("the text has a NUL character or a lone surrogate")
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value


def payload_text(data: Any) -> bytes:
    """An item as it is kept for replay."""
    return data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=True).encode()


def event_id_of(data: Any) -> str | None:
    """The event id that an item claims to have, for the answer that refuses it."""
    try:
        item = msgspec.json.decode(data) if isinstance(data, bytes) else data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(item, dict) or "event_id" not in item:
        return None
    return str(item["event_id"])[:100].encode("utf-8", "replace").decode()


def refused(error: ControlPlaneError) -> dict[str, Any]:
    """How an item's error is shown in a batch's answer."""
    shown = {"status": error.http_status, "code": error.code, "detail": error.message[:1000], "field": error.field}
    wait = getattr(error, "wait", None)
    return shown if wait is None else {**shown, "retry_after_s": int(wait) + 1}
