"""Reads for the pages: units of work, their attempts, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from django.db.models import Max, Q
from django.db.models.functions import Now

from controlplane.models import Alert, Event, Project, Replica, Run, Transfer, WorkUnit
from controlplane.services.events import run_topic
from controlplane.states import ReplicaState, RunState, TransferState, WorkKind, WorkState

PAGE = 50
STALLED_AFTER = timedelta(minutes=5)
UNCLAIMED_AFTER = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class WorkFilter:
    """What the work page was asked for. Empty means all."""

    state: str = ""
    kind: str = ""
    run: UUID | None = None
    before: UUID | None = None


@dataclass(frozen=True, slots=True)
class WorkPage:
    """Units, newest first, and the id before which older ones lie (None: there are none)."""

    units: list[WorkUnit]
    older: UUID | None


def work_page(project: Project, wanted: WorkFilter, size: int = PAGE) -> WorkPage:
    """One page of a project's units of work, newest first."""
    query = Q(project=project)
    if wanted.state:
        query &= Q(state=wanted.state)
    if wanted.kind:
        query &= Q(kind=wanted.kind)
    if wanted.run is not None:
        query &= Q(run_id=wanted.run)
    if wanted.before is not None:
        query &= Q(pk__lt=wanted.before)
    units = list(WorkUnit.objects.filter(query).select_related("run").order_by("-pk")[: size + 1])
    return WorkPage(units[:size], units[size - 1].pk if len(units) > size else None)


def dead_letters(run: Run) -> list[WorkUnit]:
    """A run's dead letters, newest first."""
    return list(WorkUnit.objects.filter(run=run, state=WorkState.DEAD).order_by("-finished_at")[:PAGE])


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong now: what, where to look, what to do. `subject` is a row's id where there is one."""

    kind: str
    what: str
    advice: str
    subject: UUID | None = None
    severe: bool = True


def problems_of(project: Project) -> list[Problem]:
    """All that is wrong in a project, the severe first."""
    found = [
        *_open_alerts(project),
        *_failed_runs(project),
        *_dead_letters(project),
        *_sick_replicas(project),
        *_failed_transfers(project),
        *_lapsed_leases(project),
        *_unclaimed_work(project),
        *_stalled_runs(project),
    ]
    return sorted(found, key=lambda problem: not problem.severe)


def _open_alerts(project: Project) -> list[Problem]:
    alerts = Alert.objects.filter(project=project, resolved_at__isnull=True).select_related("lane")
    return [
        Problem(
            "alert",
            f"{alert.lane.slug + ': ' if alert.lane else ''}{alert.detail.get('about', alert.subject)}",
            "It holds its lane: look, then resolve it." if alert.holds else "Look, then resolve it.",
            alert.pk,
            severe=alert.holds,
        )
        for alert in alerts.order_by("-holds", "-created_at")[:10]
    ]


def _failed_runs(project: Project) -> list[Problem]:
    runs = Run.objects.filter(project=project, state=RunState.FAILED).order_by("-finished_at")[:10]
    advice = "Read its dead letters, mend the cause, then resume the run."
    return [Problem("run", f"Run {run.name} failed: {run.state_reason or 'no reason'}", advice, run.pk) for run in runs]


def _dead_letters(project: Project) -> list[Problem]:
    count = WorkUnit.objects.filter(project=project, state=WorkState.DEAD).count()
    if not count:
        return []
    what = f"{count} unit of work is dead" if count == 1 else f"{count} units of work are dead"
    return [Problem("work", what, "Read the last error, mend the cause, then replay.")]


def _sick_replicas(project: Project) -> list[Problem]:
    sick = Replica.objects.filter(
        cluster__project=project, state__in=[ReplicaState.OFFLINE, ReplicaState.POISONED]
    ).select_related("cluster")
    advice = {
        ReplicaState.OFFLINE.value: "Start its engine: manage.py up starts local ones.",
        ReplicaState.POISONED.value: "It refused weights and repairs itself from a snapshot; see its last transfer.",
    }
    return [
        Problem(
            "replica",
            f"Replica {replica.cluster.slug}/{replica.name} is {replica.state}"
            + (f": {replica.error}" if replica.error else ""),
            advice[replica.state],
            replica.cluster_id,
            severe=replica.state == ReplicaState.POISONED,
        )
        for replica in sick.order_by("cluster__slug", "name")[:20]
    ]


def _failed_transfers(project: Project) -> list[Problem]:
    """The newest transfer of a slot, where it failed."""
    newest = (
        Transfer.objects.filter(replica__cluster__project=project)
        .exclude(state=TransferState.SUPERSEDED)
        .order_by("replica_id", "slot", "-created_at")
        .distinct("replica_id", "slot")
        .select_related("replica__cluster", "version")
    )
    return [
        Problem(
            "transfer",
            f"Transfer of {transfer.version.epoch}-{transfer.version.number} to "
            f"{transfer.replica.cluster.slug}/{transfer.replica.name} failed: {transfer.error or 'no reason'}",
            "The next target supersedes it; replay its unit of work to try this one again.",
            transfer.replica.cluster_id,
        )
        for transfer in newest
        if transfer.state == TransferState.FAILED
    ]


def _lapsed_leases(project: Project) -> list[Problem]:
    count = WorkUnit.objects.filter(project=project, state=WorkState.LEASED, lease_until__lt=Now()).count()
    if not count:
        return []
    what = "1 lease has run out" if count == 1 else f"{count} leases have run out"
    advice = "The conductor puts such work back within seconds. If this stays, the conductor is down: manage.py up."
    return [Problem("work", what, advice, severe=False)]


def _unclaimed_work(project: Project) -> list[Problem]:
    waiting = WorkUnit.objects.filter(
        project=project, state=WorkState.QUEUED, sends__gt=1, created_at__lt=Now() - UNCLAIMED_AFTER
    )
    kinds = sorted(set(waiting.values_list("kind", flat=True)[:1000]))
    advice = "Work was sent more than once and nobody took it: see that a worker for it runs (manage.py up)."
    return [Problem("work", f"Nobody claims {kind} work", advice, severe=False) for kind in kinds]


def _stalled_runs(project: Project) -> list[Problem]:
    """Running runs without a new event; one whose trainer holds its lease may be hours in a step."""
    training = WorkUnit.objects.filter(
        project=project, kind=WorkKind.TRAIN, state=WorkState.LEASED, run__isnull=False, lease_until__gte=Now()
    )
    runs = Run.objects.filter(project=project, state=RunState.RUNNING).exclude(pk__in=training.values("run"))
    running = {run_topic(run.pk): run for run in runs}
    quiet = (
        Event.objects.filter(topic__in=running)
        .values("topic_id")
        .annotate(last=Max("at"))
        .filter(last__lt=Now() - STALLED_AFTER)
    )
    advice = "See that the conductor and the workers run (manage.py up), and that its clusters are ready."
    return [
        Problem(
            "run",
            f"Run {running[row['topic_id']].name} has been silent since {row['last']:%H:%M} UTC",
            advice,
            running[row["topic_id"]].pk,
            severe=False,
        )
        for row in quiet
    ]
