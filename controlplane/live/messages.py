"""What a client of the websocket may say."""

from __future__ import annotations

import msgspec

MAX_MESSAGE_CHARS = 16_384
MAX_TOPIC_CHARS = 80


class BadMessage(ValueError):
    """The message is none of the protocol's; its text says why."""


class _Subscribe(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    last_seq: int | None = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    subscribe: list[_Subscribe] = []
    unsubscribe: list[str] = []


class Request(msgspec.Struct, frozen=True):
    """A checked message."""

    subscribe: list[tuple[str, int | None]]
    unsubscribe: list[str]


def parse_request(text: str | None) -> Request:
    """Raises: BadMessage."""
    if text is None:
        raise BadMessage("send text frames; binary frames are not read")
    if len(text) > MAX_MESSAGE_CHARS:
        raise BadMessage(f"the message is over {MAX_MESSAGE_CHARS} characters")
    try:
        message = msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=_Message)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadMessage(f"the message is not valid: {str(error)[:200]}") from error
    if message.v != 1:
        raise BadMessage(f"version {message.v} is not known; send v 1")
    if not message.subscribe and not message.unsubscribe:
        raise BadMessage("the message asks for nothing; give subscribe or unsubscribe")
    topics = [entry.topic for entry in message.subscribe] + message.unsubscribe
    if any(not topic or len(topic) > MAX_TOPIC_CHARS or "\x00" in topic for topic in topics):
        raise BadMessage(f"a topic is 1 to {MAX_TOPIC_CHARS} characters")
    if any(entry.last_seq is not None and not 0 <= entry.last_seq < 2**63 for entry in message.subscribe):
        raise BadMessage("last_seq is a whole number from 0, or null")
    return Request([(entry.topic, entry.last_seq) for entry in message.subscribe], message.unsubscribe)
