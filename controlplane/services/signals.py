"""Signals and the versioned map from signals to reward."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec
from django.db import transaction

from controlplane.errors import Invalid
from controlplane.models import Feedback, Project, SignalDefinition, SignalMap, User
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.states import EventType, SignalType


class Silence(StrEnum):
    """What a generation without any feedback counts as."""

    DROP = "drop"


class SignalReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one signal's value becomes a reward in [-1, 1]: `values` by name for booleans and categories, else linear."""

    values: dict[str, float] = {}
    low: float = 0.0
    high: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        rewards = (*self.values.values(), self.low, self.high)
        if any(not -1 <= reward <= 1 for reward in rewards):
            raise ValueError("rewards must lie in [-1, 1]")
        if not 0 < self.weight <= 1000:
            raise ValueError("weight must be in (0, 1000]")


class SignalMapContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole map: one entry for each signal that counts."""

    signals: dict[str, SignalReward]
    silence: Silence = Silence.DROP


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


def signal_check(signal: SignalDefinition, value: Any) -> None:
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


def reward_of(content: SignalMapContent, events: Iterable[Feedback]) -> float | None:
    """The weighted mean reward of one generation's joined feedback; None when no signal of the map is among it.

    The weight of an event is its signal's weight times its source's trust. Each sender's newest event of a signal
    counts alone, so that pressing thumbs twice is no louder than once.
    """
    newest: dict[tuple[str, str, str], Feedback] = {}
    for event in sorted(events, key=lambda item: item.occurred_at):
        newest[event.sender, event.actor_hash, event.signal.slug] = event
    total = weight_sum = 0.0
    for event in newest.values():
        rule = content.signals.get(event.signal.slug)
        reward = _event_reward(rule, event) if rule else None
        if rule is None or reward is None:
            continue
        weight = rule.weight * (event.source.trust_weight if event.source else 1.0)
        total += weight * reward
        weight_sum += weight
    return total / weight_sum if weight_sum > 0 else None


def _event_reward(rule: SignalReward, event: Feedback) -> float | None:
    signal = event.signal
    if signal.value_type != SignalType.NUMBER:
        name = str(event.value).lower() if isinstance(event.value, bool) else str(event.value)
        return rule.values.get(name)
    low, high = signal.minimum or 0.0, signal.maximum or 1.0
    if not isinstance(event.value, int | float):  # retracted meanwhile
        return None
    share = (event.value - low) / (high - low)
    return rule.low + share * (rule.high - rule.low)
