"""How states and events look: a glyph, a tone and words for each. Tests walk every enum against these tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from controlplane.states import EventType


class Tone(StrEnum):
    """What a state means for who reads it."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    INFO = "info"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Look:
    """Glyph and tone: together with the word itself, so that a tint never stands alone."""

    glyph: str
    tone: Tone


_OK, _WARN, _BAD = Look("✓", Tone.OK), Look("!", Tone.WARN), Look("✕", Tone.BAD)
_GOING, _WAITING, _PAUSED, _ENDED = (
    Look("●", Tone.INFO),
    Look("○", Tone.IDLE),
    Look("‖", Tone.WARN),
    Look("■", Tone.IDLE),
)

# By word: the same word means the same thing in every state machine.
STATE_LOOKS: dict[str, Look] = {
    "pending": _WAITING,
    "queued": _WAITING,
    "admitted": _WAITING,
    "batched": _GOING,
    "running": _GOING,
    "leased": _GOING,
    "scoring": _GOING,
    "publishing": _GOING,
    "reconciling": _GOING,
    "gating": _GOING,
    "shadow": _GOING,
    "canary": _GOING,
    "paused": _PAUSED,
    "draining": _PAUSED,
    "completed": _OK,
    "published": _OK,
    "ready": _OK,
    "consumed": _OK,
    "finished": _OK,
    "scored": _OK,
    "committed": _OK,
    "done": _OK,
    "promoted": _OK,
    "succeeded": _OK,
    "yielded": _OK,
    "joined": _OK,
    "stopped": _ENDED,
    "cancelled": _ENDED,
    "superseded": _ENDED,
    "skipped": _ENDED,
    "retracted": _ENDED,
    "dropped": _WARN,
    "lapsed": _WARN,
    "orphaned": _WARN,
    "quarantined": _WARN,
    "rolled_back": _WARN,
    "abandoned": _WARN,
    "offline": _WARN,
    "voided": _BAD,
    "failed": _BAD,
    "errored": _BAD,
    "dead": _BAD,
    "poisoned": _BAD,
}


def look_of(state: str) -> Look:
    """The look of a state's word; a neutral one for a word that is not known."""
    return STATE_LOOKS.get(state, Look("·", Tone.IDLE))


# A sentence for each kind of event. `{key}` takes the event's data; what is missing reads as "…".
EVENT_SENTENCES: dict[EventType, str] = {
    EventType.PROJECT_CREATED: "Project {slug} opened",
    EventType.MEMBER_CHANGED: "Member {user}: {before} → {role}",
    EventType.KEY_CREATED: "API key {name} created with scopes {scopes}",
    EventType.KEY_REVOKED: "API key {name} revoked",
    EventType.MODEL_REGISTERED: "Model {slug} registered",
    EventType.CLUSTER_CREATED: "Cluster {slug} created",
    EventType.REPLICA_REGISTERED: "Replica {name} registered",
    EventType.REPLICA_CHANGED: "Replica {name} is {state}",
    EventType.REPLICA_TARGETED: "Replica {name} is to hold version {version} in slot {slot}",
    EventType.TASK_SET_CREATED: "Task set {slug} version {version} stored",
    EventType.RUBRIC_PUBLISHED: "Rubric {slug} version {number} published",
    EventType.RUN_CREATED: "Run {name} created",
    EventType.RUN_CHANGED: "Run is {state}",
    EventType.STAGE_CHANGED: "Stage {position} is {state}",
    EventType.GROUP_CHANGED: "Group {position} is {state}",
    EventType.ROLLOUT_CHANGED: "Rollout {attempt} is {state}",
    EventType.STEP_CHANGED: "Step {number} is {state}",
    EventType.METRICS_RECORDED: "Metrics recorded at step {step}",
    EventType.VERSION_CHANGED: "Version {epoch}-{number} is {state}",
    EventType.EPOCH_OPENED: "Epoch {epoch} opened",
    EventType.TRANSFER_CHANGED: "Transfer of version {number} to {replica} is {state}",
    EventType.EVALUATION_CHANGED: "Evaluation after step {step_number} is {state}",
    EventType.WORK_DIED: "Work {kind} died after {failures} failures: {code}",
    EventType.WORK_REPLAYED: "Work {kind} replayed",
    EventType.LANE_CREATED: "Lane {slug} created",
    EventType.LANE_CHANGED: "Lane serves version {to}",
    EventType.RELEASE_CHANGED: "Release is {state}",
    EventType.RELEASE_APPROVED: "Release approved ({approvals})",
    EventType.SIGNAL_MAP_PUBLISHED: "Signal map {number} published",
    EventType.SOURCE_CHANGED: "Feedback source {source} changed",
    EventType.FEEDBACK_RECEIVED: "Feedback {signal} received: {state}",
    EventType.FEEDBACK_CHANGED: "Feedback is {state}",
    EventType.PAYLOAD_REJECTED: "Payload of {sender} refused: {code}",
    EventType.USER_ERASED: "A user's content erased ({generations} generations)",
}

# Kinds that somebody should look at.
ALARMING = frozenset({EventType.WORK_DIED, EventType.EPOCH_OPENED, EventType.PAYLOAD_REJECTED})
_ALARMING_STATES = frozenset({"failed", "poisoned", "dead", "rolled_back", "voided", "offline"})
_MAX_VALUE_CHARS = 120


class _Lenient(dict[str, Any]):
    """Event data for `format_map`: a missing key reads as an ellipsis, a long value is cut."""

    def __missing__(self, key: str) -> str:
        return "…"

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key) if key in self else self.__missing__(key)
        if isinstance(value, list):
            value = ", ".join(str(item) for item in value)
        text = "—" if value is None else str(value)
        return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"


def event_sentence(event_type: str, data: dict[str, Any]) -> str:
    """What happened, in words. A kind this build does not know is shown by its name."""
    try:
        sentence = EVENT_SENTENCES[EventType(event_type)]
    except ValueError:
        return event_type
    return sentence.format_map(_Lenient(data))


def event_tone(event_type: str, data: dict[str, Any]) -> Tone:
    """Whether the event is one to look at."""
    if event_type in ALARMING:
        return Tone.BAD
    state = str(data.get("state", ""))
    return look_of(state).tone if state in _ALARMING_STATES else Tone.IDLE
