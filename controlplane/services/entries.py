"""One event on its way in, who sent it, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.errors import Conflict, ControlPlaneError
from controlplane.models import FeedbackSource, Project
from controlplane.services.events import Actor
from controlplane.services.intake import Stored, Target
from controlplane.services.payloads import FeedbackPayload
from controlplane.services.signals import SignalShape
from controlplane.states import FeedbackState


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends: events are deduplicated and limited within a sender. A source lends its name, trust and limits."""

    project: Project
    name: str
    actor: Actor
    source: FeedbackSource | None = None


class Receipt(msgspec.Struct, frozen=True):
    """What became of an event: 201 joined, 202 pending, 200 the same event again or a dry run."""

    event_id: str
    status: int
    feedback_id: str | None
    join: str
    duplicate: bool = False

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {
            "id": self.feedback_id,
            "join": self.join,
            "duplicate": self.duplicate,
        }


Outcome = Receipt | ControlPlaneError


@dataclass(slots=True)
class Entry:
    """One item on its way. `refusal` is an error that a receipt of the same event would overrule."""

    payload: FeedbackPayload | None = None
    event_id: str = ""
    body_hash: str = ""
    signal: SignalShape | None = None
    target_id: str = ""
    target: Target | None = None
    refusal: ControlPlaneError | None = None
    error: ControlPlaneError | None = None
    receipt: Receipt | None = None

    @property
    def dry(self) -> bool:
        """Whether it only asks what would become of it."""
        return self.payload is not None and self.payload.dry_run

    @property
    def state(self) -> str:
        """What a dry run is told."""
        return "joined" if self.target else "pending"

    def settle(self, stored: Stored, state: str) -> None:
        """Its outcome by what stands under its event id."""
        if stored.body_hash != self.body_hash:
            self.error = Conflict("this event_id was sent before with another body; use a new event_id", "event_id")
        elif stored.fresh:
            status = 202 if state == FeedbackState.PENDING else 201
            self.receipt = Receipt(self.event_id, status, stored.feedback_id, state)
        else:
            self.receipt = Receipt(self.event_id, 200, stored.feedback_id, state, duplicate=True)

    def outcome(self) -> Outcome:
        """What is answered."""
        found = self.error or self.receipt or self.refusal
        assert found is not None
        return found
