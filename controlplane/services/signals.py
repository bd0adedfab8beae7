"""Signals and the versioned map from signals to reward."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec
from django.db import transaction

from controlplane.errors import Invalid
from controlplane.models import Feedback, Project, SignalDefinition, SignalMap, User
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.states import EventType, SignalType


class Silence(StrEnum):
    """What a generation whose horizon closed without any feedback that counts is taken for."""

    DROP = "drop"
    VALUE = "value"


class SignalReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one signal's value becomes a reward in [-1, 1]: `values` by name for booleans and categories, else linear.

    Times run from the answer to what the user did. Before `delay_s` it does not count (an edit that is a minute old
    has not persisted), after `horizon_s` (0: the map's) no longer; every `half_life_s` (0: never) it counts half.
    """

    values: dict[str, float] = {}
    low: float = 0.0
    high: float = 1.0
    weight: float = 1.0
    delay_s: float = 0.0
    half_life_s: float = 0.0
    horizon_s: float = 0.0

    def __post_init__(self) -> None:
        rewards = (*self.values.values(), self.low, self.high)
        if any(not -1 <= reward <= 1 for reward in rewards):
            raise ValueError("rewards must lie in [-1, 1]")
        if not 0 < self.weight <= 1000:
            raise ValueError("weight must be in (0, 1000]")
        _times(delay_s=self.delay_s, half_life_s=self.half_life_s, horizon_s=self.horizon_s)
        if 0 < self.horizon_s <= self.delay_s:
            raise ValueError("horizon_s must be over delay_s: no event would count")


class SignalMapContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole map: one entry for each signal that counts.

    `horizon_s` (0: none) closes the time for feedback: what arrives later is `late`, shown and never trained on.
    `silence` says what no feedback is taken for; `weigh_responses` weighs those who answered by one over their
    response rate. An outcome of an episode is credited to each of its turns before it, `episode_discount` times less
    with every turn between.
    """

    signals: dict[str, SignalReward]
    silence: Silence = Silence.DROP
    silence_value: float = 0.0
    horizon_s: float = 0.0
    weigh_responses: bool = True
    episode_discount: float = 1.0

    def __post_init__(self) -> None:
        if not -1 <= self.silence_value <= 1:
            raise ValueError("silence_value must lie in [-1, 1]")
        if not 0 <= self.episode_discount <= 1:
            raise ValueError("episode_discount must be in [0, 1]")
        _times(horizon_s=self.horizon_s)
        for slug, rule in self.signals.items():
            if 0 < self.horizon_of(slug) <= rule.delay_s:
                raise ValueError(f"the horizon must be over delay_s of {slug}: no event would count")

    def horizon_of(self, slug: str) -> float:
        """Seconds after an answer in which the signal counts; 0 without a bound."""
        rule = self.signals.get(slug)
        return rule.horizon_s if rule is not None and rule.horizon_s else self.horizon_s

    @property
    def longest_horizon_s(self) -> float:
        """Seconds after which an answer's reward is settled, as far as horizons are set; 0 without any."""
        return max((self.horizon_of(slug) for slug in self.signals), default=self.horizon_s)


MAX_TIME_S = 90 * 86400.0


def _times(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= MAX_TIME_S:
            raise ValueError(f"{name} must be in [0, {MAX_TIME_S:.0f}] seconds")


def signal_define(
    *,
    project: Project,
    slug: str,
    value_type: SignalType,
    minimum: float | None = None,
    maximum: float | None = None,
    categories: list[str] | None = None,
) -> SignalDefinition:
    """Define a signal. Raises: Invalid when the range does not fit the type."""
    if value_type == SignalType.NUMBER and (minimum is None or maximum is None or minimum >= maximum):
        raise Invalid("a number signal needs minimum < maximum", field="minimum")
    if value_type == SignalType.CATEGORY and not categories:
        raise Invalid("a category signal needs its categories", field="categories")
    return SignalDefinition.objects.create(
        project=project,
        slug=slug,
        value_type=value_type,
        minimum=minimum,
        maximum=maximum,
        categories=categories or [],
    )


class SignalShape(msgspec.Struct, frozen=True):
    """What values of a signal look like, as `SignalDefinition` has it."""

    id: UUID
    slug: str
    value_type: SignalType
    minimum: float | None
    maximum: float | None
    categories: list[str]


def signal_check(signal: SignalShape | SignalDefinition, value: Any) -> None:
    """Raises: Invalid when the value is not of the signal's type and range."""
    if signal.value_type == SignalType.BOOLEAN:
        if not isinstance(value, bool):
            raise Invalid(f"signal {signal.slug} takes true or false", field="value")
        return
    if signal.value_type == SignalType.CATEGORY:
        if value not in signal.categories:
            raise Invalid(f"signal {signal.slug} takes one of {', '.join(signal.categories)}", field="value")
        return
    low, high = signal.minimum, signal.maximum
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if low is None or high is None or not number or not low <= value <= high:
        raise Invalid(f"signal {signal.slug} takes a number in [{low}, {high}]", field="value")


@transaction.atomic
def signal_map_publish(*, project: Project, content: dict[str, Any], author: User | None, actor: Actor) -> SignalMap:
    """Publish a new immutable version of the project's map. Raises: Invalid, naming what is wrong."""
    try:
        parsed = msgspec.convert(content, type=SignalMapContent)
    except msgspec.ValidationError as error:
        raise Invalid(f"the signal map is not valid: {error}", field="content") from error
    known = set(SignalDefinition.objects.filter(project=project).values_list("slug", flat=True))
    unknown = sorted(set(parsed.signals) - known)
    if unknown:
        raise Invalid(f"the signal map names undefined signals: {', '.join(unknown)}", field="content")
    Project.objects.select_for_update().get(id=project.id)  # numbers are given one at a time
    last = SignalMap.objects.filter(project=project).order_by("-number").first()
    resolved = msgspec.to_builtins(parsed)
    digest = hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()
    if last is not None and last.content_hash == digest:
        return last
    published = SignalMap.objects.create(
        project=project,
        number=last.number + 1 if last else 1,
        content_hash=digest,
        content=resolved,
        author=author,
    )
    event_append(
        project_id=project.id,
        topic=project_topic(project.id),
        event_type=EventType.SIGNAL_MAP_PUBLISHED,
        actor=actor,
        data={"number": published.number, "hash": digest},
    )
    return published


@dataclass(frozen=True, slots=True)
class Reward:
    """What a generation's feedback is worth: the reward, and how much of the events' weight time and distance left."""

    value: float
    strength: float


def reward_of(
    content: SignalMapContent,
    events: Iterable[Feedback],
    *,
    generation_at: datetime | None = None,
) -> float | None:
    """The reward that `reward_and_strength` gives, alone."""
    found = reward_and_strength(content, events, generation_at=generation_at)
    return None if found is None else found.value


def reward_and_strength(
    content: SignalMapContent,
    events: Iterable[Feedback],
    *,
    generation_at: datetime | None = None,
) -> Reward | None:
    """The weighted mean reward of one generation's feedback; None when nothing is left of it and silence has no value.

    An actor's newest event of a signal counts alone, and the actors of one sender share that sender's one voice on the
    signal: neither pressing thumbs twice nor a hundred made-up actors is louder than one. Voices weigh the signal's
    weight times their source's trust times what age and, of an episode's outcome, distance leave of them.
    `generation_at` is when the answer was given (None: no rule of time is applied).
    """
    newest: dict[tuple[str, str, str], Feedback] = {}
    for event in sorted(events, key=lambda item: (item.occurred_at, item.id)):
        newest[event.sender, event.signal.slug, event.actor_hash] = event
    voices: dict[tuple[str, str], list[tuple[float, float]]] = {}
    weights: dict[tuple[str, str], float] = {}
    for (sender, slug, _), event in newest.items():
        rule = content.signals.get(slug)
        reward = _event_reward(rule, event) if rule else None
        left = _left_of(content, slug, event, generation_at)
        if rule is None or reward is None or left is None:
            continue
        left *= content.episode_discount**event.distance
        voices.setdefault((sender, slug), []).append((left, reward))
        weights[sender, slug] = rule.weight * (event.source.trust_weight if event.source else 1.0)
    total = heard = full = 0.0
    for voice, said in voices.items():
        left_sum = sum(left for left, _ in said)
        if left_sum > 0:
            weight = weights[voice] * left_sum / len(said)
            total += weight * sum(left * reward for left, reward in said) / left_sum
            heard += weight
            full += weights[voice]
    if heard > 0:
        return Reward(total / heard, heard / full)
    return Reward(content.silence_value, 1.0) if content.silence is Silence.VALUE else None


def _left_of(content: SignalMapContent, slug: str, event: Feedback, generation_at: datetime | None) -> float | None:
    """What the time since the answer leaves of an event's weight; None when it came too soon or too late to count.

    The sender's clock is believed between the answer and the event's arrival.
    """
    rule = content.signals.get(slug)
    if generation_at is None or rule is None:
        return 1.0
    latest = max(event.created_at, generation_at)
    elapsed_s = (min(max(event.occurred_at, generation_at), latest) - generation_at).total_seconds()
    horizon_s = content.horizon_of(slug)
    if elapsed_s < rule.delay_s or 0 < horizon_s < elapsed_s:
        return None
    return float(0.5 ** (elapsed_s / rule.half_life_s)) if rule.half_life_s else 1.0


def _event_reward(rule: SignalReward, event: Feedback) -> float | None:
    signal = event.signal
    if signal.value_type != SignalType.NUMBER:
        name = str(event.value).lower() if isinstance(event.value, bool) else str(event.value)
        return rule.values.get(name)
    low, high = signal.minimum, signal.maximum
    if low is None or high is None or not isinstance(event.value, int | float):  # retracted meanwhile
        return None
    share = (event.value - low) / (high - low)
    return rule.low + share * (rule.high - rule.low)
