"""How states and events look: a glyph, a tone and words for each. Tests walk every enum against these tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from string import Formatter
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
    "open": _WAITING,
    "training": _GOING,
    "releasing": _GOING,
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
    "drained": _PAUSED,
    "lent": _GOING,
    "returning": _GOING,
    "returned": _ENDED,
    "completed": _OK,
    "published": _OK,
    "ready": _OK,
    "consumed": _OK,
    "finished": _OK,
    "scored": _OK,
    "committed": _OK,
    "done": _OK,
    "promoted": _OK,
    "proven": _OK,
    "succeeded": _OK,
    "yielded": _OK,
    "joined": _OK,
    "stopped": _ENDED,
    "cancelled": _ENDED,
    "superseded": _ENDED,
    "skipped": _ENDED,
    "retracted": _ENDED,
    "deleted": _ENDED,
    "dropped": _WARN,
    "lapsed": _WARN,
    "orphaned": _WARN,
    "quarantined": _WARN,
    "late": _WARN,
    "undecided": _WARN,
    "rolled_back": _WARN,
    "abandoned": _WARN,
    "offline": _WARN,
    "inconclusive": _WARN,
    "waived": _WARN,
    "held": _WARN,
    "rolling_back": _WARN,
    "frozen": Look("❄", Tone.INFO),
    "by_hand": _WAITING,
    "pass": _OK,
    "fail": _BAD,
    "voided": _BAD,
    "refused": _BAD,
    "failed": _BAD,
    "errored": _BAD,
    "dead": _BAD,
    "poisoned": _BAD,
}


def look_of(state: str) -> Look:
    """The look of a state's word; a neutral one for a word that is not known."""
    return STATE_LOOKS.get(state, Look("·", Tone.IDLE))


# Sentences for each kind of event: the first of which all data are there and say something is taken, else the last.
EVENT_SENTENCES: dict[EventType, tuple[str, ...]] = {
    EventType.PROJECT_CREATED: ("Project {slug} opened",),
    EventType.MEMBER_CHANGED: ("Member {user}: {before} → {role}", "Member {user} is {role}"),
    EventType.KEY_CREATED: ("API key {name} created with scopes {scopes}",),
    EventType.KEY_REVOKED: ("API key {name} revoked",),
    EventType.MODEL_REGISTERED: ("Model {slug} registered",),
    EventType.ENVIRONMENT_REGISTERED: ("Remote environment {slug} registered",),
    EventType.CLUSTER_CREATED: ("Cluster {slug} created",),
    EventType.CLUSTER_CHANGED: ("Cluster {slug}: {change}",),
    EventType.REPLICA_REGISTERED: ("Replica {cluster}/{name} registered",),
    EventType.REPLICA_CHANGED: ("Replica of {cluster} is {state}",),
    EventType.REPLICA_TARGETED: ("Replica of {cluster} is to hold version {version} in slot {slot}",),
    EventType.REPLICA_STEERED: ("Replica {cluster}/{name}: {action}",),
    EventType.LENDING_CHANGED: ("Lending of {cluster}: {change}",),
    EventType.LOAN_CHANGED: ("Replica {cluster}/{name} is {state}",),
    EventType.TASK_SET_CREATED: ("Task set {slug} version {version} stored",),
    EventType.TASK_SET_PROVEN: (
        "Task set {slug} version {version} is {state}: {refused} of {checked} tasks do not hold",
    ),
    EventType.RUBRIC_PUBLISHED: ("Rubric {slug} version {number} published",),
    EventType.RUN_CREATED: ("Run {name} created",),
    EventType.RUN_CHANGED: ("Run is {state}",),
    EventType.STAGE_CHANGED: ("Stage {position} is {state}",),
    EventType.GROUP_CHANGED: ("Group {position} is {state}", "Groups {positions} are {state}"),
    EventType.ROLLOUT_CHANGED: ("Rollout {rollout} is {state} after {turns} turns",),
    EventType.STEP_CHANGED: ("Step {number} is {state}",),
    EventType.METRICS_RECORDED: ("Metrics recorded at step {step}", "Metrics recorded"),
    EventType.VERSION_CHANGED: ("Version {epoch}-{number} is {state}",),
    EventType.EPOCH_OPENED: ("Epoch {epoch} opened",),
    EventType.EXPORT_CHANGED: ("Export of version {version} as {format} is {state}",),
    EventType.TRANSFER_CHANGED: ("Transfer of version {version} to {cluster} is {state}",),
    EventType.EVALUATION_CHANGED: ("Evaluation after step {step_number} is {state}",),
    EventType.WORK_DIED: ("Work {kind} died after {failures} failures: {code}",),
    EventType.WORK_REPLAYED: ("Work {kind} replayed",),
    EventType.LANE_CREATED: ("Lane {slug} created",),
    EventType.LANE_CHANGED: ("Lane serves version {to}", "Lane: {change}"),
    EventType.RELEASE_CHANGED: ("Release of version {version} is {state}", "Release is {state}"),
    EventType.RELEASE_APPROVED: ("Release approved ({approvals} so far)",),
    EventType.SLOT_CHANGED: ("Slot {number} is {state}: {detail}", "Slot {number} is {state}"),
    EventType.CANARY_ANALYSED: ("Canary at {share} of users: {verdict}",),
    EventType.ALERT_RAISED: ("Alert: {kind} {subject}",),
    EventType.ALERT_RESOLVED: ("Alert resolved: {kind} {subject}",),
    EventType.ALERT_HOOK_CHANGED: ("Alert hook {url} changed",),
    EventType.CONSENT_WITHDRAWN: ("A user withdrew consent ({generations} generations, {versions} versions)",),
    EventType.SIGNAL_MAP_PUBLISHED: ("Signal map {number} published",),
    EventType.SOURCE_CHANGED: ("Feedback source {source} changed",),
    EventType.FEEDBACK_RECEIVED: ("{count} feedback events received", "Feedback {signal} received: {state}"),
    EventType.FEEDBACK_CHANGED: ("{count} feedback events are {state}", "Feedback is {state}"),
    EventType.PAYLOAD_REJECTED: ("{count} payloads of {sender} refused", "Payload of {sender} refused: {code}"),
    EventType.USER_ERASED: ("A user's content erased ({generations} generations)",),
}

# Kinds that somebody should look at.
ALARMING = frozenset({EventType.WORK_DIED, EventType.EPOCH_OPENED, EventType.PAYLOAD_REJECTED, EventType.ALERT_RAISED})
_ALARMING_STATES = frozenset({"failed", "poisoned", "dead", "rolled_back", "voided", "offline"})
_MAX_VALUE_CHARS = 120
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VERSION = re.compile(r"([A-Za-z0-9-]{1,64}):(\d+-\d+)")
_VERSION_INSIDE = re.compile(rf"\b({_UUID.pattern}):(\d+-\d+)")
LINEAGE_CHARS = 6


class _Lenient(dict[str, Any]):
    """Event data for `format_map`: ids are cut to what tells them apart, a missing key reads as an ellipsis."""

    def __missing__(self, key: str) -> str:
        return "…"

    def __getitem__(self, key: str) -> str:
        value = super().__getitem__(key) if key in self else self.__missing__(key)
        if key == "state":
            value = str(value).replace("_", " ")
        items = value if isinstance(value, list) else [value]
        text = ", ".join(_brief(item) for item in items)
        return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"


def _brief(value: Any) -> str:
    """A value in a sentence: a version with the end of its lineage's id, the end of an id."""
    text = "nobody" if value is None else str(value)
    if version := _VERSION.fullmatch(text):
        return f"{version[1][-LINEAGE_CHARS:]}:{version[2]}"
    if _UUID.fullmatch(text):
        return f"…{text[-8:]}"
    return _VERSION_INSIDE.sub(lambda found: f"{found[1][-LINEAGE_CHARS:]}:{found[2]}", text)


def version_name(version: Any) -> str:
    """A policy version as sentences name it."""
    return _brief(str(version.ref))


def event_sentence(event_type: str, data: dict[str, Any]) -> str:
    """What happened, in words. A kind this build does not know is shown by its name."""
    if event_type not in EVENT_SENTENCES:
        return event_type
    sentences = EVENT_SENTENCES[EventType(event_type)]
    whole = (text for text in sentences if all(data.get(key) not in (None, "") for key in _keys_of(text)))
    return next(whole, sentences[-1]).format_map(_Lenient(data))


def _keys_of(sentence: str) -> list[str]:
    return [key for _, key, _, _ in Formatter().parse(sentence) if key]


def event_tone(event_type: str, data: dict[str, Any]) -> Tone:
    """Whether the event is one to look at."""
    if event_type in ALARMING:
        return Tone.BAD
    state = str(data.get("state", ""))
    return look_of(state).tone if state in _ALARMING_STATES else Tone.IDLE
