"""Filters of lists. A parameter that does not parse is refused (422); one that is unknown, too."""

# django-filter has no types: its classes are Any to mypy.
from __future__ import annotations

from typing import Any, ClassVar

import django_filters as filters
from django import forms
from django_filters.rest_framework import FilterSet

from controlplane import states
from rl_core.types import ClusterRole, Split

MAX_INTEGER = 2**31 - 1


class CountFilter(filters.Filter):  # type: ignore[misc]
    """A whole number that a 32-bit column can hold."""

    field_class = forms.IntegerField

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, min_value=0, max_value=MAX_INTEGER, **kwargs)


def choices(enum: Any, field: str = "") -> filters.ChoiceFilter:
    """One of an enum's values."""
    pairs = getattr(enum, "choices", None) or [(member.value, member.value) for member in enum]
    return filters.ChoiceFilter(choices=pairs, field_name=field or None)


class CreatedFilter(FilterSet):  # type: ignore[misc]
    """Rows by the time of their creation."""

    created_after: ClassVar[Any] = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="gte")
    created_before: ClassVar[Any] = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="lt")


class RunFilter(CreatedFilter):
    """Runs."""

    state = choices(states.RunState)
    name = filters.CharFilter(lookup_expr="icontains", max_length=200)
    model = filters.CharFilter(field_name="lineage__model__slug", max_length=64)


class StepFilter(FilterSet):  # type: ignore[misc]
    """Steps of a run."""

    state = choices(states.StepState)
    after = CountFilter(field_name="number", lookup_expr="gt")


class GroupFilter(CreatedFilter):
    """Rollout groups."""

    run = filters.UUIDFilter(field_name="run_id")
    stage = filters.UUIDFilter(field_name="stage_id")
    evaluation = filters.UUIDFilter(field_name="evaluation_id")
    step = CountFilter(field_name="step__number")
    task = filters.UUIDFilter(field_name="task_id")
    state = choices(states.GroupState)
    purpose = choices(states.GroupPurpose)


class RolloutFilter(CreatedFilter):
    """Rollouts."""

    run = filters.UUIDFilter(field_name="group__run_id")
    group = filters.UUIDFilter(field_name="group_id")
    step = CountFilter(field_name="group__step__number")
    purpose = choices(states.GroupPurpose, "group__purpose")
    state = choices(states.RolloutState)
    min_reward = filters.NumberFilter(field_name="reward", lookup_expr="gte")
    max_reward = filters.NumberFilter(field_name="reward", lookup_expr="lte")


class EvaluationFilter(CreatedFilter):
    """Evaluations."""

    run = filters.UUIDFilter(field_name="run_id")
    version = filters.UUIDFilter(field_name="version_id")
    state = choices(states.EvaluationState)


class VersionFilter(CreatedFilter):
    """Policy versions."""

    run = filters.UUIDFilter(field_name="lineage__run__id")
    lineage = filters.UUIDFilter(field_name="lineage_id")
    state = choices(states.VersionState)


class ExportFilter(CreatedFilter):
    """Exports."""

    version = filters.UUIDFilter(field_name="version_id")


class TransferFilter(CreatedFilter):
    """Transfers."""

    replica = filters.UUIDFilter(field_name="replica_id")
    cluster = filters.CharFilter(field_name="replica__cluster__slug", max_length=64)
    version = filters.UUIDFilter(field_name="version_id")
    run = filters.UUIDFilter(field_name="version__lineage__run__id")
    state = choices(states.TransferState)


class ClusterFilter(FilterSet):  # type: ignore[misc]
    """Clusters."""

    role = choices(ClusterRole)


class ReplicaFilter(FilterSet):  # type: ignore[misc]
    """Replicas."""

    cluster = filters.CharFilter(field_name="cluster__slug", max_length=64)
    state = choices(states.ReplicaState)


class LoanFilter(CreatedFilter):
    """Hand-overs of replicas to rollouts."""

    cluster = filters.CharFilter(field_name="replica__cluster__slug", max_length=64)
    replica = filters.UUIDFilter(field_name="replica_id")
    run = filters.UUIDFilter(field_name="run_id")
    state = choices(states.LoanState)


class TaskSetFilter(FilterSet):  # type: ignore[misc]
    """Task sets."""

    slug = filters.CharFilter(max_length=64)
    environment = filters.CharFilter(max_length=64)


class TaskFilter(FilterSet):  # type: ignore[misc]
    """Tasks of a set."""

    split = choices(Split)


class MembershipFilter(FilterSet):  # type: ignore[misc]
    """Roles."""

    role = choices(states.MemberRole)


class EventFilter(FilterSet):  # type: ignore[misc]
    """The event log."""

    topic = filters.CharFilter(field_name="topic_id", max_length=80)
    type = choices(states.EventType)
    actor_kind = choices(states.ActorKind)
    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte")
    until = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt")


class WorkFilter(CreatedFilter):
    """Units of work."""

    run = filters.UUIDFilter(field_name="run_id")
    ref = filters.UUIDFilter()
    kind = choices(states.WorkKind)
    state = choices(states.WorkState)


class AttemptFilter(CreatedFilter):
    """Attempts."""

    unit = filters.UUIDFilter(field_name="unit_id")
    run = filters.UUIDFilter(field_name="unit__run_id")
    kind = choices(states.WorkKind, "unit__kind")
    state = choices(states.AttemptState)


class AlertFilter(CreatedFilter):
    """Alerts."""

    lane = filters.CharFilter(field_name="lane__slug", max_length=64)
    kind = choices(states.AlertKind)
    open = filters.BooleanFilter(field_name="resolved_at", lookup_expr="isnull")


class ReleaseFilter(CreatedFilter):
    """Releases."""

    lane = filters.CharFilter(field_name="lane__slug", max_length=64)
    state = choices(states.ReleaseState)


class GenerationFilter(CreatedFilter):
    """Generations."""

    lane = filters.CharFilter(field_name="lane__slug", max_length=64)
    version = filters.UUIDFilter(field_name="version_id")
    consent = choices(states.Consent)


class FeedbackFilter(CreatedFilter):
    """Feedback."""

    signal = filters.CharFilter(field_name="signal__slug", max_length=64)
    state = choices(states.FeedbackState)
    generation = filters.UUIDFilter(field_name="generation_id")
