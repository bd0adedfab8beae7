"""The form of a new run: a handful of fields, or the whole spec as JSON. Defaults are the spec's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import msgspec
from django.http import QueryDict

from controlplane.selectors.pages_runs import RunIngredients
from frontend.outcomes import Problems
from frontend.queries import text_of
from rl_core.environments.environment import Environment
from rl_core.errors import SpecError
from rl_core.session_specs import CompactionKind
from rl_core.specs import CurriculumKind, RlStage, RunSpec, parse_run_spec, resolve_run_spec

_MAX_JSON_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class NumberField:
    """A numeric field: where its value goes in the stage, and how the browser edits it."""

    name: str
    label: str
    path: tuple[str, ...]
    help: str = ""
    whole: bool = True
    minimum: str = ""
    step: str = "1"


_KINDS: dict[str, type[StrEnum]] = {"curriculum": CurriculumKind, "compaction": CompactionKind}

NUMBERS: tuple[NumberField, ...] = (
    NumberField("steps", "Steps", ("steps",), "optimiser steps in all", minimum="1"),
    NumberField("prompts_per_step", "Prompts a step", ("prompts_per_step",), "groups in each batch", minimum="1"),
    NumberField("group_size", "Group size", ("group_size",), "attempts at each prompt", minimum="2"),
    NumberField(
        "learning_rate", "Learning rate", ("optimizer", "learning_rate"), "AdamW, fp32 master", False, "0", "any"
    ),
    NumberField(
        "max_staleness", "Max staleness", ("max_staleness",), "in policy versions; older is dropped", minimum="0"
    ),
    NumberField("max_turns", "Turns", ("max_turns",), "of a session, at most", minimum="1"),
    NumberField("max_tokens", "Tokens a turn", ("sampling", "max_tokens"), "sampled at most", minimum="1"),
    NumberField("max_context_tokens", "Context", ("max_context_tokens",), "tokens that the policy sees", minimum="64"),
    NumberField("max_parallel_calls", "Calls a turn", ("max_parallel_calls",), "to tools, at most", minimum="1"),
    NumberField("eval_every", "Evaluate every", ("eval_every",), "steps; 0: before and after only", minimum="0"),
    NumberField("eval_tasks", "Held-out tasks", ("eval_tasks",), "in each evaluation", minimum="1"),
)

_OF_LIMITS = ("max_turns", "max_context_tokens", "max_parallel_calls")
CHOICES = {name: [kind.value for kind in kinds] for name, kinds in _KINDS.items()}  # the first is the default


def suggested(ingredients: RunIngredients, environments: Iterable[Environment]) -> dict[str, dict[str, str]]:
    """By task set, what its environment was made for: field values that hold until somebody types others."""
    known = {environment.slug: environment for environment in environments}
    found = {}
    for task_set in ingredients.task_sets:
        environment = known.get(task_set.environment)
        if environment is None:
            continue
        limits = environment.limits
        values = {
            name: str(getattr(limits, name)) for name in ("max_turns", "max_context_tokens", "max_parallel_calls")
        }
        values |= {"max_tokens": str(environment.sampling.max_tokens), "compaction": limits.compaction.kind.value}
        rubrics = [slug for slug in (task_set.slug, environment.slug) if slug in ingredients.rubrics]
        found[task_set.slug] = values | ({"rubric": rubrics[0]} if rubrics else {})
    return found


def _default(path: tuple[str, ...]) -> Any:
    value: Any = RlStage()
    for name in path:
        value = getattr(value, name)
    return value


@dataclass(slots=True)
class RunForm:
    """A new run as typed."""

    values: dict[str, str]
    clusters: list[str]
    as_json: bool = False
    spec_text: str = ""
    problems: Problems = field(default_factory=Problems)

    @classmethod
    def like(cls, spec: dict[str, Any], name: str) -> Self:
        """The spec of a run to repeat."""
        form = cls(_values_of(spec, name), [str(slug) for slug in spec.get("rollout_clusters", [])])
        form.spec_text = _pretty(spec)
        form.as_json = len(spec.get("stages", [])) != 1
        return form

    @classmethod
    def fresh(cls, ingredients: RunIngredients, hints: dict[str, dict[str, str]]) -> Self:
        """The defaults for what the project has, with what is suggested for the first task set."""
        task_set = ingredients.task_sets[0].slug if ingredients.task_sets else ""
        values = {spec.name: _text(_default(spec.path)) for spec in NUMBERS}
        values |= {
            "name": "",
            "model": ingredients.models[0] if ingredients.models else "",
            "task_set": task_set,
            "rubric": next(iter(ingredients.rubrics), ""),
            "seed": "0",
            **{name: kinds[0] for name, kinds in CHOICES.items()},
            **hints.get(task_set, {}),
        }
        form = cls(values, list(ingredients.clusters))
        form.spec_text = _pretty(form.spec(ingredients))
        form.problems = Problems()
        return form

    @classmethod
    def of_post(cls, data: QueryDict) -> Self:
        """What was typed."""
        names = ["name", "model", "task_set", "rubric", "seed", *CHOICES, *(spec.name for spec in NUMBERS)]
        form = cls({name: text_of(data, name) for name in names}, data.getlist("clusters"))
        form.as_json = data.get("mode") == "json"
        form.spec_text = data.get("spec", "")[:_MAX_JSON_CHARS].replace("\x00", "")
        if not form.values["name"]:
            form.problems.add("Give the run a name", "name")
        return form

    def spec(self, ingredients: RunIngredients) -> dict[str, Any]:
        """The spec as data, with what does not parse noted as problems."""
        if self.as_json:
            return self._spec_of_json()
        environments = {task_set.slug: task_set.environment for task_set in ingredients.task_sets}
        named = self.values["task_set"]
        stage: dict[str, Any] = {
            "kind": "rl",
            "task_set": named,
            "environment": environments.get(named.partition("@")[0], named),
            "rubric": self.values["rubric"],
        }
        for name, kinds in CHOICES.items():
            stage[name] = {"kind": self.values[name] or kinds[0]}
        for number in NUMBERS:
            self._place(stage, number)
        chosen = [slug for slug in self.clusters if slug in ingredients.clusters]
        spec = {
            "model": self.values["model"],
            "seed": self._number("seed", whole=True),
            "rollout_clusters": [] if len(chosen) == len(ingredients.clusters) else chosen,
            "stages": [stage],
        }
        if ingredients.clusters and not chosen:
            self.problems.add("Choose at least one cluster", "clusters")
        return spec

    def resolved(self, spec: dict[str, Any]) -> str:
        """The spec with its defaults, as text; unresolved where it does not validate."""
        try:
            return _pretty(resolve_run_spec(parse_run_spec(spec)))
        except SpecError:
            return _pretty(spec)

    def refuse(self, message: str, path: str = "") -> None:
        """Put a message of the service beside the field that it speaks of."""
        if self.as_json:
            self.problems.add(message, "name" if path == "name" else "spec")
            return
        self.problems.add(message, self._field_of(message, path))

    def _field_of(self, message: str, path: str) -> str:
        if path in ("name", "spec.model", "spec.rollout_clusters"):
            return {"spec.model": "model", "spec.rollout_clusters": "clusters"}.get(path, path)
        words = set(re.findall(r"[a-z_]+", message))
        for name in (*(number.name for number in NUMBERS), "seed", *CHOICES):
            if name in words:
                return name
        for name, phrase in (("task_set", "task set"), ("rubric", "rubric"), ("task_set", "environment")):
            if phrase in message:
                return name
        return ""

    def _place(self, stage: dict[str, Any], number: NumberField) -> None:
        target = stage
        for name in number.path[:-1]:
            target = target.setdefault(name, {})
        target[number.path[-1]] = self._number(number.name, whole=number.whole)

    def _number(self, name: str, *, whole: bool) -> int | float | None:
        text = self.values[name]
        try:
            return int(text) if whole else float(text)
        except ValueError:
            self.problems.add("Give a whole number" if whole else "Give a number, for example 3e-5", name)
            return None

    def _spec_of_json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.spec_text)
        except (ValueError, RecursionError) as error:
            self.problems.add(f"This is not JSON: {error}", "spec")
            return {}
        if not isinstance(value, dict):
            self.problems.add("The spec is an object: {…}", "spec")
            return {}
        return value


def _values_of(spec: dict[str, Any], name: str) -> dict[str, str]:
    """Field values from a resolved spec's first RL stage."""
    stages = [stage for stage in spec.get("stages", []) if stage.get("kind") == "rl"]
    stage = stages[0] if stages else msgspec.to_builtins(RlStage())
    values = {"name": name, "model": str(spec.get("model", "")), "seed": str(spec.get("seed", 0))}
    values |= {key: str(stage.get(key, "")) for key in ("task_set", "rubric")}
    values |= {name: str(stage.get(name, {}).get("kind", kinds[0])) for name, kinds in CHOICES.items()}
    for number in NUMBERS:
        value: Any = stage
        for key in number.path:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        values[number.name] = _text(value) if isinstance(value, int | float) else _text(_default(number.path))
    return values


def _text(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _pretty(spec: dict[str, Any]) -> str:
    return json.dumps(spec, indent=2, ensure_ascii=False)


def spec_fields() -> list[str]:
    """Top-level keys of a run spec, for the JSON editor's help."""
    return [info.name for info in msgspec.structs.fields(RunSpec)]
