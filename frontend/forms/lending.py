"""The form of a lending policy: windows as lines, durations as people write them. `rl_core.lending` checks it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from django.http import QueryDict

from controlplane.selectors.pages_lending import LenderView, window_text
from frontend.durations import EXAMPLE, duration_parse, duration_text, number_text
from frontend.forms.freezes import day_of
from frontend.outcomes import Problems
from frontend.queries import text_of
from rl_core.errors import SpecError
from rl_core.lending import MAX_QUERY_CHARS, MAX_WINDOWS, LendingSpec, LendingWindow, LoadSource, lending_parse

TEXTS = ("timezone", "source", "prometheus_url")
NUMBERS = ("lend_below", "return_above")
DURATIONS = ("settle_s", "window_s", "return_within_s")
WHOLES = ("keep", "sessions")


@dataclass(slots=True)
class LendingForm:
    """A policy as typed."""

    values: dict[str, str]
    enabled: bool = True
    problems: Problems = field(default_factory=Problems)
    sources: ClassVar[list[tuple[str, str]]] = [
        (LoadSource.NONE.value, "not looked at: the hours alone decide"),
        (LoadSource.GATEWAY.value, "requests a second for each replica: the gateway's answers and what is under way"),
        (LoadSource.PROMETHEUS.value, "a Prometheus query"),
    ]

    @classmethod
    def of_post(cls, posted: QueryDict) -> Self:
        """What was typed."""
        values = {name: text_of(posted, name) for name in (*TEXTS, *NUMBERS, *DURATIONS, *WHOLES)}
        for name, most in (("windows", 80 * MAX_WINDOWS), ("prometheus_query", MAX_QUERY_CHARS)):
            values[name] = posted.get(name, "").replace("\x00", "")[:most]
        return cls(values, enabled="enabled" in posted)

    @classmethod
    def of_policy(cls, lender: LenderView) -> Self:
        """What is set; a first suggestion where nothing is."""
        nights = LendingWindow(days=tuple(range(7)), start="22:00", end="06:00")
        spec = lender.spec or LendingSpec(windows=(nights,))
        values = {name: str(getattr(spec, name)) for name in (*TEXTS, "prometheus_query", *WHOLES)}
        values |= {name: number_text(getattr(spec, name)) for name in NUMBERS}
        values |= {name: duration_text(getattr(spec, name)) for name in DURATIONS}
        values["windows"] = "\n".join(window_text(window) for window in spec.windows)
        return cls(values, enabled=lender.policy is None or lender.policy.enabled)

    def spec(self) -> dict[str, Any]:
        """As the service wants it; what cannot be read is noted beside its field."""
        read: dict[str, Any] = {name: self.values[name] for name in (*TEXTS, "prometheus_query")}
        read["timezone"] = read["timezone"] or "UTC"
        for names, parse, example in (
            (NUMBERS, _number, "a number"),
            (DURATIONS, duration_parse, EXAMPLE),
            (WHOLES, _whole, "a whole number"),
        ):
            for name in names:
                read[name] = parse(self.values[name])
                if read[name] is None:
                    self.problems.add(f"Give {example}", name)
        read["windows"] = self._windows()
        if not self.problems:
            try:
                lending_parse(read)
            except SpecError as error:
                self.problems.add(str(error), _field_of(str(error)))
        return read

    def _windows(self) -> list[dict[str, Any]]:
        found = []
        for number, line in enumerate(self.values["windows"].splitlines(), 1):
            if not line.strip():
                continue
            try:
                days, hours = line.split()
                start, end = hours.split("-")
                found.append({"days": [day_of(day) for day in days.split(",") if day], "start": start, "end": end})
            except ValueError as error:
                said = str(error) if "is no day" in str(error) else "write Mon,Tue 22:00-06:00"
                self.problems.add(f"line {number}: {said}", "windows")
        return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _field_of(message: str) -> str:
    """The field that a message of the spec's validation speaks of; empty when it names none."""
    named = (name for name in (*NUMBERS, *DURATIONS, *WHOLES, "prometheus_query", "prometheus_url") if name in message)
    if found := next(named, ""):
        return found
    if "window" in message or "day" in message or "start" in message:
        return "windows"
    return "timezone" if "zone" in message else "source" if "source" in message else ""
