"""The signal map as a form: one row for each defined signal, and what is said of the whole."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from django.http import QueryDict

from controlplane.models import SignalDefinition
from controlplane.services.signals import SignalMapContent, SignalReward, Silence
from controlplane.states import SignalType
from frontend.durations import EXAMPLE, duration_parse, duration_text, number_text
from frontend.outcomes import Problems

MAX_CHARS = 40
TIMES = ("delay_s", "half_life_s", "horizon_s")


@dataclass(slots=True)
class Cell:
    """One value of a signal and the reward that it gets. `name` is the form's, `label` what people see."""

    name: str
    label: str
    text: str


@dataclass(slots=True)
class SignalRow:
    """One signal as typed."""

    signal: SignalDefinition
    counts: bool
    cells: list[Cell]
    weight: str
    times: dict[str, str]
    errors: list[str] = field(default_factory=list)

    @classmethod
    def of_rule(cls, signal: SignalDefinition, rule: SignalReward | None) -> Self:
        """A signal with its present rule; without one it does not count."""
        shown = rule or SignalReward()
        given = {"low": shown.low, "high": shown.high, **{f"v_{key}": value for key, value in shown.values.items()}}
        return cls(
            signal=signal,
            counts=rule is not None,
            cells=[
                Cell(name, label, number_text(given[name]) if name in given else "") for name, label in _cells(signal)
            ],
            weight=number_text(shown.weight),
            times={name: duration_text(getattr(shown, name)) for name in TIMES},
        )

    @classmethod
    def of_post(cls, signal: SignalDefinition, data: QueryDict) -> Self:
        """What was typed of a signal."""

        def typed(name: str) -> str:
            return data.get(f"{signal.slug}.{name}", "").replace("\x00", "").strip()[:MAX_CHARS]

        return cls(
            signal=signal,
            counts=bool(data.get(f"{signal.slug}.counts")),
            cells=[Cell(name, label, typed(name)) for name, label in _cells(signal)],
            weight=typed("weight"),
            times={name: typed(name) for name in TIMES},
        )

    def parsed(self) -> dict[str, Any]:
        """The rule as data; what does not parse is noted."""
        numbers = {cell.name: self._number(cell.text, cell.label) for cell in self.cells if cell.text}
        rule: dict[str, Any] = {key: value for key, value in numbers.items() if key in ("low", "high")}
        values = {key.removeprefix("v_"): value for key, value in numbers.items() if key.startswith("v_")}
        if self.signal.value_type != SignalType.NUMBER:
            rule["values"] = values
            if not values:
                self.errors.append("give at least one of its values a reward")
        rule["weight"] = self._number(self.weight, "weight")
        for name, text in self.times.items():
            seconds = duration_parse(text or "0")
            if seconds is None:
                self.errors.append(f"{name.removesuffix('_s').replace('_', ' ')}: give a duration, {EXAMPLE}")
            rule[name] = seconds or 0.0
        if not self.errors:
            try:
                msgspec.convert(rule, type=SignalReward)
            except msgspec.ValidationError as error:
                self.errors.append(str(error))
        return rule

    def _number(self, text: str, label: str) -> float:
        try:
            return float(text)
        except ValueError:
            self.errors.append(f"{label}: {text[:20]!r} is not a number")
            return 0.0


def _cells(signal: SignalDefinition) -> list[tuple[str, str]]:
    if signal.value_type == SignalType.NUMBER:
        return [
            ("low", f"at {number_text(signal.minimum or 0.0)}"),
            ("high", f"at {number_text(signal.maximum or 0.0)}"),
        ]
    names = ["true", "false"] if signal.value_type == SignalType.BOOLEAN else signal.categories
    return [(f"v_{name}", name) for name in names]


@dataclass(slots=True)
class SignalMapForm:
    """A whole map as typed."""

    rows: list[SignalRow]
    silence: str
    silence_value: str
    horizon: str
    weigh_responses: bool
    episode_discount: str
    problems: Problems = field(default_factory=Problems)

    @classmethod
    def of_content(cls, content: SignalMapContent | None, signals: list[SignalDefinition]) -> Self:
        """The published map; without one no signal counts yet."""
        shown = content or SignalMapContent(signals={})
        return cls(
            rows=[SignalRow.of_rule(signal, shown.signals.get(signal.slug)) for signal in signals],
            silence=shown.silence.value,
            silence_value=number_text(shown.silence_value),
            horizon=duration_text(shown.horizon_s),
            weigh_responses=shown.weigh_responses,
            episode_discount=number_text(shown.episode_discount),
        )

    @classmethod
    def of_post(cls, data: QueryDict, signals: list[SignalDefinition]) -> Self:
        """What was typed."""
        return cls(
            rows=[SignalRow.of_post(signal, data) for signal in signals],
            silence=data.get("silence", "")[:MAX_CHARS],
            silence_value=data.get("silence_value", "").strip()[:MAX_CHARS],
            horizon=data.get("horizon", "").strip()[:MAX_CHARS],
            weigh_responses=bool(data.get("weigh_responses")),
            episode_discount=data.get("episode_discount", "").strip()[:MAX_CHARS],
        )

    def content(self) -> SignalMapContent | None:
        """The map; None with what is wrong beside its row or field."""
        counting = [row for row in self.rows if row.counts]
        if not counting:
            self.problems.add("Let at least one signal count", "signals")
        data = {
            "signals": {row.signal.slug: row.parsed() for row in counting},
            "silence": self.silence if self.silence in list(Silence) else Silence.DROP.value,
            "silence_value": self._number(self.silence_value, "silence_value"),
            "horizon_s": self._duration(),
            "weigh_responses": self.weigh_responses,
            "episode_discount": self._number(self.episode_discount, "episode_discount"),
        }
        if self.problems or any(row.errors for row in counting):
            return None
        try:
            return msgspec.convert(data, type=SignalMapContent)
        except msgspec.ValidationError as error:
            self._place(str(error), counting)
            return None

    def _place(self, message: str, counting: list[SignalRow]) -> None:
        """Put a message of the map's own validation beside what it names."""
        words = set(re.findall(r"[\w-]+", message))
        row = next((one for one in counting if one.signal.slug in words), None)
        if row is not None:
            row.errors.append(message)
        else:
            self.problems.add(
                message, next((name for name in ("silence_value", "episode_discount") if name in words), "")
            )

    def _duration(self) -> float:
        seconds = duration_parse(self.horizon or "0")
        if seconds is None:
            self.problems.add(f"Give a duration: {EXAMPLE}", "horizon")
        return seconds or 0.0

    def _number(self, text: str, name: str) -> float:
        try:
            return float(text or 0)
        except ValueError:
            self.problems.add("Give a number", name)
            return 0.0


def content_hash(content: SignalMapContent) -> str:
    """What the map is known by, as when it is published: a preview of one map is no preview of another."""
    return hashlib.sha256(json.dumps(msgspec.to_builtins(content), sort_keys=True).encode()).hexdigest()
