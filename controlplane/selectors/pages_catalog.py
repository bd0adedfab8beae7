"""Reads for the pages: task sets and rubrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from django.db.models import Count, Max, QuerySet

from controlplane.models import ModelCard, Project, Rubric, RubricVersion, TaskSet
from rl_core.environments.criteria import CRITERIA, WATCHED, CriterionKind
from rl_core.environments.reward import Tier


def task_sets_of(project: Project) -> QuerySet[TaskSet]:
    """Task sets by name, newest version first."""
    return TaskSet.objects.filter(project=project).order_by("slug", "-version")


def models_of(project: Project) -> QuerySet[ModelCard]:
    """Models of the catalogue, newest first."""
    return ModelCard.objects.filter(project=project).order_by("-created_at")


def rubrics_of(project: Project) -> QuerySet[Rubric]:
    """Rubrics by name, annotated with `version_count`, `last_number` and `last_at`."""
    return (
        Rubric.objects.filter(project=project)
        .annotate(
            version_count=Count("versions"), last_number=Max("versions__number"), last_at=Max("versions__created_at")
        )
        .order_by("slug")
    )


def rubric_versions_of(rubric: Rubric) -> list[RubricVersion]:
    """Versions of a rubric, newest first."""
    return list(rubric.versions.select_related("author").order_by("-number"))


@dataclass(frozen=True, slots=True)
class WeightedCriterion:
    """A criterion with its share of the reward."""

    key: str
    text: str
    kind: str
    tier: str
    weight: float
    share: float
    params: dict[str, Any]


def weighted_criteria(criteria: list[dict[str, Any]]) -> list[WeightedCriterion]:
    """Criteria of a rubric version, each with its weight as a share of all."""
    total = sum(float(row.get("weight", 0)) for row in criteria) or 1.0
    return [
        WeightedCriterion(
            key=str(row.get("key", "")),
            text=str(row.get("text", "")),
            kind=str(row.get("kind", "")),
            tier=str(row.get("tier", Tier.IMPORTANT.value)),
            weight=float(row.get("weight", 0)),
            share=float(row.get("weight", 0)) / total,
            params=dict(row.get("params") or {}),
        )
        for row in criteria
    ]


@dataclass(frozen=True, slots=True)
class KindShown:
    """A kind of criterion for who writes one: what its value means, and its parameters with their defaults."""

    kind: str
    meaning: str
    params: list[str]
    watched: bool


def kinds_shown() -> list[KindShown]:
    """Every kind, in the order in which rubrics offer them."""
    return [
        KindShown(
            kind=kind.value,
            meaning=(row.grade.__doc__ or "").partition("Raises:")[0].partition("\n")[0].replace("`", "").strip(),
            params=[_param(field) for field in msgspec.structs.fields(row.params)],
            watched=kind in WATCHED,
        )
        for kind, row in CRITERIA.items()
    ]


def _param(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return f"{field.name} (required)"
    return f"{field.name} = {msgspec.json.encode(field.default).decode()}"


CRITERION_KINDS: tuple[str, ...] = tuple(kind.value for kind in CriterionKind)
TIERS: tuple[str, ...] = tuple(tier.value for tier in Tier)
