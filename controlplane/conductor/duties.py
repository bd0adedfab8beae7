"""What the conductor does, each at its own interval. To add a duty, add a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
from django.conf import settings

from controlplane.conductor.advance import run_advance, runs_active
from controlplane.conductor.fleet import fleet_poll, leases_sweep, poisoned_repair, replicas_sweep, slots_reconcile
from controlplane.conductor.lanes import lanes_place
from controlplane.conductor.lending import loans_advance, policies_look
from controlplane.conductor.looks import Looks
from controlplane.conductor.remotes import sessions_release
from controlplane.conductor.shipping import advance_lanes, look_at_canaries, watch_lanes
from controlplane.conductor.storage import collect_garbage, retire_versions
from controlplane.services.cheating import run_watch, runs_watched
from controlplane.services.consents import content_release
from controlplane.services.derivations import derivations_plan
from controlplane.services.evaluations import evaluation_advance, evaluations_open
from controlplane.services.idempotency import idempotency_age
from controlplane.services.joins import feedback_sweep
from controlplane.services.rejections import rejections_age
from controlplane.services.work import work_sweep

log = structlog.get_logger(__name__)

_runs, _evaluations, _watched = Looks("run"), Looks("evaluation"), Looks("run for signs of cheating")


@dataclass(frozen=True, slots=True)
class Duty:
    """Something to look at again and again. `on_nudge`: at once when the database says that something changed."""

    name: str
    every_s: float
    action: Callable[[], object]
    on_nudge: bool = False


def advance_runs() -> None:
    """Every active run, each in its own transactions."""
    for run_id in runs_active():
        _runs.at(run_id, partial(run_advance, run_id))


def advance_evaluations() -> None:
    """Every open evaluation, those that belong to no run included."""
    for evaluation_id in evaluations_open():
        _evaluations.at(evaluation_id, partial(evaluation_advance, evaluation_id))


def sweep_leases() -> None:
    """Work whose lease ran out goes back."""
    swept = work_sweep()
    if swept:
        log.warning("leases_lapsed", units=swept)


def sweep_feedback() -> None:
    """Feedback that came while its generation was being written is joined; what waited too long is given up.

    Refused payloads that are too old go, and content that nobody consents to any more.
    """
    feedback_sweep()
    rejections_age()
    content_release()


def watch_runs() -> None:
    """Signs of cheating in every run that rolls out."""
    for run in runs_watched():
        _watched.at(run.pk, partial(run_watch, run))


def look_every_s() -> float:
    """How often runs and evaluations are looked at when nothing nudges: every change that matters to them does."""
    return settings.CONDUCTOR_TICK_S * 4


def duties() -> tuple[Duty, ...]:
    """The conductor's duties, in the order in which they are done. Slow looks at the network are apart."""
    return (
        Duty("sweep", 2.0, sweep_leases),
        Duty("evaluations", look_every_s(), advance_evaluations, on_nudge=True),
        Duty("runs", look_every_s(), advance_runs, on_nudge=True),
        Duty("leases", 1.0, leases_sweep),
        Duty("gone", 60.0, replicas_sweep),
        Duty("slots", 1.0, slots_reconcile),
        Duty("repairs", 2.0, poisoned_repair),
        Duty("loans", 1.0, loans_advance, on_nudge=True),
        Duty("shipping", 1.0, advance_lanes, on_nudge=True),
        Duty("lanes", 2.0, lanes_place),
        Duty("feedback", 10.0, sweep_feedback),
        Duty("idempotency", 600.0, idempotency_age),
    )


def slow_duties() -> tuple[Duty, ...]:
    """Duties that wait for others' answers or read much; they have a thread of their own."""
    return (
        Duty("lending", 5.0, policies_look),
        Duty("canaries", 5.0, look_at_canaries),
        Duty("monitors", 60.0, watch_lanes),
        Duty("cheating", 60.0, watch_runs),
        Duty("remotes", 10.0, sessions_release),
    )


def fleet_duties() -> tuple[Duty, ...]:
    """The look at every replica, whose answers may all be late; it has a thread of its own too."""
    return (Duty("fleet", 3.0, fleet_poll),)


def storage_duties() -> tuple[Duty, ...]:
    """Duties that read the whole object store or all versions; they have a thread of their own too."""
    return (
        Duty("derivations", 2.0, derivations_plan),
        Duty("retention", 60.0, retire_versions),
        Duty("garbage", settings.GARBAGE_EVERY_S, collect_garbage),
    )
