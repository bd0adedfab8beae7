"""The form of a lane's cadence: fields, or the whole spec as JSON. Its meaning only `rl_core.shipping.specs` knows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from django.http import QueryDict

from controlplane.selectors.pages_cadence import freeze_text
from frontend.durations import EXAMPLE, duration_parse, duration_text, number_text
from frontend.forms.freezes import freezes_parse
from frontend.outcomes import Problems
from frontend.queries import text_of
from rl_core.errors import SpecError
from rl_core.shipping.specs import Direction, MetricRole, MetricSource, cadence_parse, cadence_resolve

MAX_JSON_CHARS = 50_000
MAX_METRICS = 20
SPARE_METRICS = 2
METRIC_FIELDS = ("name", "source", "key", "role", "direction", "margin", "alpha_share")


@dataclass(frozen=True, slots=True)
class Typed:
    """One field: where its value goes in the spec, how it is read, and what is said beside it."""

    name: str
    label: str
    path: tuple[str, ...]
    kind: str = "number"
    help: str = ""


GROUPS: tuple[tuple[str, str, tuple[Typed, ...]], ...] = (
    (
        "When",
        "a slot opens when it is due, nothing is frozen and enough feedback has matured",
        (
            Typed("interval", "Interval", ("interval_s",), "duration", "0: slots open by hand alone"),
            Typed("minimum_signals", "Matured signals", ("minimum_signals",), "whole", "a slot waits for so many"),
            Typed("horizon", "Horizon", ("horizon_s",), "duration", "older answers count as complete"),
            Typed("deadline", "Deadline", ("deadline_s",), "duration", "undecided by then: skipped; 0: four intervals"),
            Typed("timezone", "Time zone", ("timezone",), "text", "of the freezes, such as Europe/Paris"),
        ),
    ),
    (
        "Gate",
        "candidate and incumbent on the same held-out tasks",
        (
            Typed("gate_task_set", "Task set", ("gate", "task_set"), "text", "empty: the run's"),
            Typed("gate_rubric", "Rubric", ("gate", "rubric"), "text", "empty: the run's"),
            Typed("gate_tasks", "Tasks", ("gate", "tasks"), "whole"),
            Typed("gate_temperature", "Temperature", ("gate", "temperature"), help="of sampling"),
            Typed("gate_margin", "Margin", ("gate", "margin"), help="how much worse is still as good"),
        ),
    ),
    (
        "Shadow",
        "recorded prompts replayed on the candidate; no user sees it",
        (
            Typed("shadow_prompts", "Prompts", ("shadow", "prompts"), "whole", "0: no shadow"),
            Typed("shadow_margin", "Margin", ("shadow", "margin"), help="of each rate"),
            Typed("shadow_max_tokens", "Tokens an answer", ("shadow", "max_tokens"), "whole"),
            Typed("shadow_rubric", "Rubric", ("shadow", "rubric"), "text", "grades both answers; empty: none"),
        ),
    ),
    (
        "Canary",
        "a growing share of users, watched",
        (
            Typed("steps", "Steps", ("canary", "steps"), "shares", "in percent, rising; empty: no canary"),
            Typed("hold", "Hold each", ("canary", "hold_s"), "duration", "at least"),
            Typed("minimum_users", "Matured users", ("canary", "minimum_users"), "whole", "in each arm"),
            Typed("alpha", "False alarms", ("canary", "alpha"), help="chance that a harmless candidate is stopped"),
            Typed("ratio_alpha", "Sample ratio", ("canary", "sample_ratio_alpha"), help="p below which arms misfit"),
        ),
    ),
    (
        "Monitors",
        "signs that the reward is being cheated, against the incumbent",
        (
            Typed("behaviours", "Behaviours", ("monitors", "behaviours"), "words", "with commas between them"),
            Typed("threshold", "Threshold", ("monitors", "threshold"), help="change of a rate that calls a person"),
            Typed("minimum", "Answers", ("monitors", "minimum"), "whole", "of each version, at least"),
            Typed("divergence", "Divergence", ("monitors", "divergence"), help="of gates from what users say"),
        ),
    ),
)
FLAGS: dict[str, tuple[str, ...]] = {
    "auto_promote": ("auto_promote",),
    "require_gain": ("canary", "require_gain"),
    "monitors_hold": ("monitors", "hold"),
}
_FIELDS: tuple[Typed, ...] = tuple(typed for _, _, group in GROUPS for typed in group)


@dataclass(slots=True)
class CadenceForm:
    """A cadence as typed. `mode`: `fields`, `json`, or `off`."""

    values: dict[str, str]
    flags: set[str]
    metrics: list[dict[str, str]]
    mode: str = "fields"
    text: str = ""
    problems: Problems = field(default_factory=Problems)
    sources: ClassVar[list[str]] = [source.value for source in MetricSource]
    roles: ClassVar[list[str]] = [role.value for role in MetricRole]
    directions: ClassVar[list[str]] = [direction.value for direction in Direction]

    @classmethod
    def of_spec(cls, spec: dict[str, Any]) -> Self:
        """A cadence that is set, or the defaults."""
        parsed = cadence_parse(spec)
        whole = cadence_resolve(parsed)
        values = {typed.name: _shown(typed, _at(whole, typed.path)) for typed in _FIELDS}
        values["freezes"] = "\n".join(freeze_text(freeze) for freeze in parsed.freezes)
        values["stage"] = json.dumps(whole["stage"], indent=2) if whole["stage"] else ""
        flags = {name for name, path in FLAGS.items() if _at(whole, path)}
        rows = [{name: _plain(row[name]) for name in METRIC_FIELDS} for row in whole["canary"]["metrics"]]
        shown = json.dumps(whole, indent=2, ensure_ascii=False)
        return cls(values, flags, _with_spare(rows), text=shown)

    @classmethod
    def of_post(cls, data: QueryDict) -> Self:
        """What was typed."""
        values = {typed.name: text_of(data, typed.name) for typed in _FIELDS}
        values |= {name: data.get(name, "")[:MAX_JSON_CHARS].replace("\x00", "") for name in ("freezes", "stage")}
        columns = [data.getlist(f"metric_{name}")[:MAX_METRICS] for name in METRIC_FIELDS]
        rows = [
            dict(zip(METRIC_FIELDS, (value.replace("\x00", "").strip()[:64] for value in row), strict=True))
            for row in zip(*columns, strict=False)
        ]
        mode = data.get("mode", "fields")
        return cls(
            values,
            {name for name in FLAGS if data.get(name)},
            _with_spare([row for row in rows if row["name"]]),
            mode=mode if mode in ("fields", "json", "off") else "fields",
            text=data.get("spec", "")[:MAX_JSON_CHARS].replace("\x00", ""),
        )

    @property
    def groups(self) -> list[tuple[str, str, list[tuple[Typed, str, list[str]]]]]:
        """The groups with each field's value and what is wrong with it."""
        wrong = self.problems.by_field
        return [
            (name, note, [(typed, self.values.get(typed.name, ""), wrong.get(typed.name, [])) for typed in group])
            for name, note, group in GROUPS
        ]

    def spec(self, base: dict[str, Any]) -> dict[str, Any]:
        """The cadence as data, with what does not parse noted. What the form has no field for is kept as it was."""
        if self.mode == "off":
            return {}
        if self.mode == "json":
            return self._object(self.text, "spec")
        spec: dict[str, Any] = json.loads(json.dumps(base))
        for typed in _FIELDS:
            _put(spec, typed.path, self._read(typed))
        for name, path in FLAGS.items():
            _put(spec, path, name in self.flags)
        spec["freezes"] = self._freezes()
        spec["stage"] = self._object(self.values["stage"], "stage") if self.values["stage"].strip() else {}
        spec.setdefault("canary", {})["metrics"] = [self._metric(row) for row in self.metrics if row["name"]]
        return spec

    def check(self, spec: dict[str, Any]) -> None:
        """Note what the spec's own validation says, beside the field that it speaks of."""
        if not spec:
            return
        try:
            cadence_parse(spec)
        except SpecError as error:
            message = str(error).removeprefix("the cadence is not valid: ")
            place = "spec" if self.mode == "json" else _field_of(message)
            self.problems.add(message.split(" - at ")[0] if place not in ("", "spec", "metrics") else message, place)

    def _read(self, typed: Typed) -> Any:
        text = self.values[typed.name]
        if typed.kind == "text":
            return text
        if typed.kind == "words":
            return [word for word in re.split(r"[\s,]+", text) if word]
        if typed.kind == "shares":
            return self._shares(typed, text)
        if typed.kind == "duration":
            seconds = duration_parse(text)
            if seconds is None:
                self.problems.add(f"Give a duration: {EXAMPLE}", typed.name)
            return seconds or 0.0
        try:
            return int(text) if typed.kind == "whole" else float(text)
        except ValueError:
            self.problems.add("Give a whole number" if typed.kind == "whole" else "Give a number", typed.name)
            return 0

    def _shares(self, typed: Typed, text: str) -> list[float]:
        try:
            return [round(float(word) / 100, 6) for word in re.split(r"[\s,%]+", text) if word]
        except ValueError:
            self.problems.add("Give percentages, for example 1, 5, 25, 50", typed.name)
            return []

    def _freezes(self) -> list[dict[str, Any]]:
        found, wrong = freezes_parse(self.values["freezes"])
        for message in wrong:
            self.problems.add(message, "freezes")
        return found

    def _metric(self, row: dict[str, str]) -> dict[str, Any]:
        metric: dict[str, Any] = dict(row)
        for name in ("margin", "alpha_share"):
            try:
                metric[name] = float(row[name] or 0)
            except ValueError:
                self.problems.add(f"{row['name']}: {name.replace('_', ' ')} is not a number", "metrics")
                metric[name] = 0.0
        return metric

    def _object(self, text: str, name: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.problems.add(f"This is not JSON: {error}", name)
            return {}
        if not isinstance(value, dict):
            self.problems.add("Give an object: {…}", name)
            return {}
        return value


def _with_spare(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The metrics, and empty rows to add some."""
    blank = dict.fromkeys(METRIC_FIELDS, "") | {
        "source": MetricSource.SIGNAL.value,
        "role": MetricRole.GUARDRAIL.value,
        "direction": Direction.HIGHER.value,
    }
    return [*rows, *(dict(blank) for _ in range(SPARE_METRICS))]


def _at(spec: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = spec
    for name in path:
        value = value[name]
    return value


def _put(spec: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        spec = spec.setdefault(name, {})
    spec[path[-1]] = value


def _plain(value: Any) -> str:
    return number_text(value) if isinstance(value, float) else str(value)


def _shown(typed: Typed, value: Any) -> str:
    if typed.kind == "duration":
        return duration_text(float(value))
    if typed.kind == "words":
        return ", ".join(value)
    if typed.kind == "shares":
        return ", ".join(f"{100 * share:g}" for share in value)
    return _plain(value)


def _field_of(message: str) -> str:
    """The field that a message of the spec's validation speaks of; empty when it names none."""
    path = re.search(r"`\$\.?(.*?)`", message)
    names = re.findall(r"[a-z_]+", path[1] if path else "")
    spoken = set(re.findall(r"[a-z_]+", message))
    for name in ("freezes", "metrics", "stage"):
        if name in names or name in spoken:
            return name
    nested = [typed for typed in _FIELDS if len(typed.path) > 1 and names[:1] == [typed.path[0]]]
    for typed in (*nested, *_FIELDS):
        if typed.path[-1] in spoken or typed.path[-1] in names:
            return typed.name
    return ""
