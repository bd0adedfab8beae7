"""Product events, and the detectors that read them as signals. To add a kind: a struct, a detector, a row.

An event says what a user did with an answer. Texts in it are looked at and forgotten: a detector gives a value alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from rl_core.errors import SignalError
from rl_core.signals.edits import edit_persistence
from rl_core.signals.followups import read_followup

MAX_LATENCY_S: Final = 600.0


class ValueKind(StrEnum):
    """What a detector's value is."""

    BOOLEAN = "boolean"
    NUMBER = "number"


class _Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all events: unknown keys are refused."""


class EditObserved(_Event, frozen=True, tag_field="kind", tag="edit_observed"):
    """A text before a model's edit, right after it, and as it is now; `after_s` later."""

    before: str
    after: str
    now: str
    after_s: float = 0.0


class Regenerated(_Event, frozen=True, tag_field="kind", tag="regenerated"):
    """The user asked for another answer to the same question; `times` so far."""

    times: int = 1


class Copied(_Event, frozen=True, tag_field="kind", tag="copied"):
    """The user copied characters out of an answer of so many."""

    characters: int
    answer_characters: int


class Decided(_Event, frozen=True, tag_field="kind", tag="decided"):
    """The user took or refused a suggestion."""

    accepted: bool


class Waited(_Event, frozen=True, tag_field="kind", tag="waited"):
    """How long the user waited, as the product saw it: to the first token and to the end."""

    first_token_ms: float
    total_ms: float


class FollowedUp(_Event, frozen=True, tag_field="kind", tag="followed_up"):
    """What the user wrote next, and what they had written before the answer."""

    text: str
    previous: str = ""


ProductEvent = EditObserved | Regenerated | Copied | Decided | Waited | FollowedUp


@dataclass(frozen=True, slots=True)
class Detector:
    """Which signal a kind of event gives, and of which range. `read` gives None where the event says nothing."""

    signal: str
    value: ValueKind
    read: Callable[[Any], bool | float | None]
    minimum: float = 0.0
    maximum: float = 1.0


def _copied(event: Copied) -> float:
    if event.answer_characters <= 0 or event.characters < 0:
        raise SignalError("copied needs answer_characters > 0 and characters >= 0")
    return min(1.0, event.characters / event.answer_characters)


def _waited(event: Waited) -> float:
    if not 0 <= event.first_token_ms <= event.total_ms:
        raise SignalError("waited needs 0 <= first_token_ms <= total_ms")
    return min(MAX_LATENCY_S, event.total_ms / 1000)


def _regenerated(event: Regenerated) -> bool:
    if event.times < 1:
        raise SignalError("regenerated needs times >= 1")
    return True


DETECTORS: Final[dict[type[_Event], Detector]] = {
    EditObserved: Detector(
        "edit_persisted", ValueKind.NUMBER, lambda event: edit_persistence(event.before, event.after, event.now)
    ),
    Regenerated: Detector("regenerated", ValueKind.BOOLEAN, _regenerated),
    Copied: Detector("copied", ValueKind.NUMBER, _copied),
    Decided: Detector("accepted", ValueKind.BOOLEAN, lambda event: event.accepted),
    Waited: Detector("latency_s", ValueKind.NUMBER, _waited, maximum=MAX_LATENCY_S),
    FollowedUp: Detector(
        "dissatisfied_followup",
        ValueKind.BOOLEAN,
        lambda event: read_followup(event.text, previous=event.previous).dissatisfied,
    ),
}


def detect(event: ProductEvent) -> tuple[Detector, bool | float | None]:
    """The detector of the event's kind and the value it reads; None when the event says nothing (an empty edit).

    Raises: SignalError.
    """
    detector = DETECTORS[type(event)]
    return detector, detector.read(event)
