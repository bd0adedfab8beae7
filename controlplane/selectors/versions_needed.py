"""Which versions' weights somebody may still ask for, and who. Every other version may be retired.

To give weights a further use, add a row to `NEEDS`: retention knows of no other.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.conf import settings
from django.db.models import F, Q, QuerySet, Value
from django.db.models.functions import Now

from controlplane.models import (
    Evaluation,
    Export,
    Lane,
    Lineage,
    PolicyVersion,
    Publication,
    Release,
    ReplicaSlot,
    Run,
    ServedVersion,
    Step,
    Transfer,
    WorkUnit,
)
from controlplane.states import (
    UNDER_WAY,
    EvaluationState,
    ReleaseState,
    RunState,
    StepState,
    VersionState,
    WorkKind,
    WorkState,
)

_ENDED = [RunState.COMPLETED, RunState.STOPPED]
_CHECKPOINTS: Final = 2  # that a run keeps
_SLACK: Final = 8  # versions that may be committed before a skip-delta is planned


@dataclass(frozen=True, slots=True)
class Need:
    """Rows whose `columns` name versions that are needed, and why."""

    reason: str
    rows: Callable[[], QuerySet[Any]]
    columns: tuple[str, ...] = ("pk",)


def versions_needed(among: Iterable[uuid.UUID] | None = None) -> dict[uuid.UUID, list[str]]:
    """Versions whose weights are needed, with every reason; `among` asks about these alone."""
    wanted = None if among is None else list(among)
    found: dict[uuid.UUID, list[str]] = defaultdict(list)
    for need in NEEDS:
        for column in need.columns:
            rows = need.rows().filter(**{f"{column}__isnull": False})
            if wanted is not None:
                rows = rows.filter(**{f"{column}__in": wanted})
            for version_id in rows.order_by().values_list(column, flat=True).distinct():
                found[version_id].append(need.reason)
    return dict(found)


def _runs() -> QuerySet[Run]:
    """Runs that may still train."""
    return Run.objects.exclude(state__in=_ENDED)


def _newest() -> QuerySet[PolicyVersion]:
    """The newest of each run, and those that the next skip-deltas begin at."""
    depth = F("depth") + Value(max(settings.RETENTION_VERSIONS, *settings.SKIP_DELTAS, 0) + _SLACK)
    return PolicyVersion.objects.filter(lineage__run__in=_runs(), lineage__head__depth__lt=depth)


def _first() -> QuerySet[PolicyVersion]:
    return PolicyVersion.objects.filter(lineage__run__in=_runs(), number=0)


def _since_checkpoints() -> QuerySet[PolicyVersion]:
    """Versions since the oldest checkpoint that a run keeps: a trainer that is rebuilt publishes them again."""
    since = Q(pk__in=[])
    for run in _runs().only("lineage_id", "checkpoint_step", "spec"):
        every = max((stage.get("checkpoint_every", 1) for stage in run.spec["stages"]), default=1)
        since |= Q(lineage=run.lineage_id, number__gte=run.checkpoint_step - _CHECKPOINTS * every)
    return PolicyVersion.objects.filter(since)


def _served(days: int) -> QuerySet[ServedVersion]:
    recent = Q(until__isnull=True) | Q(until__gt=Now() - Value(timedelta(days=days)))
    return ServedVersion.objects.filter(recent)


def _audited() -> QuerySet[ServedVersion]:
    days = settings.AUDIT_DAYS
    return _served(days) if days else ServedVersion.objects.all()


def _exports() -> QuerySet[Export]:
    """Exports that a worker is about to write."""
    units = WorkUnit.objects.filter(kind=WorkKind.EXPORT, state__in=[WorkState.QUEUED, WorkState.LEASED])
    return Export.objects.filter(pk__in=units.values("ref"))


NEEDS: Final = (
    Need("head of its lineage", Lineage.objects.all, ("head",)),
    Need("among the newest of a run", _newest),
    Need("the run began from it", _first),
    Need("since a checkpoint of its run", _since_checkpoints),
    Need(
        "a step trains from it",
        lambda: Step.objects.exclude(state=StepState.PUBLISHED).filter(run__in=_runs()),
        ("base_version",),
    ),
    Need("held by a replica", ReplicaSlot.objects.all, ("current_version",)),
    Need("wanted on a replica", ReplicaSlot.objects.all, ("desired_version",)),
    Need(
        "in a transfer",
        lambda: Transfer.objects.filter(state__in=UNDER_WAY),
        ("version", "from_version"),
    ),
    Need(
        "under evaluation",
        lambda: Evaluation.objects.filter(state__in=[EvaluationState.PENDING, EvaluationState.RUNNING]),
        ("version",),
    ),
    Need("answers a lane's users", Lane.objects.all, ("promoted_version", "rollback_to")),
    Need("in a lane's rollback window", lambda: _served(settings.ROLLBACK_DAYS), ("version",)),
    Need("answered users: for the audit", _audited, ("version",)),
    Need(
        "in a release",
        lambda: Release.objects.filter(
            state__in=[
                ReleaseState.PENDING,
                ReleaseState.GATING,
                ReleaseState.SHADOW,
                ReleaseState.CANARY,
                ReleaseState.PAUSED,
            ]
        ),
        ("version", "incumbent"),
    ),
    Need("to be exported", _exports, ("version",)),
    Need(
        "a publication of it is being made",
        lambda: Publication.objects.filter(published_at__isnull=True, deleted_at__isnull=True),
        ("version", "base_version"),
    ),
    Need("being published", lambda: PolicyVersion.objects.filter(state=VersionState.PUBLISHING), ("parent",)),
)
