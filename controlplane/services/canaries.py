"""Canary steps: a candidate answers a growing share of users, every look is judged, and harm ends it at once.

The judgement and the rule of the steps are `rl_core.shipping.canary`'s; the rows that it is given are
`controlplane.selectors.canary_outcomes`'s. Here both are acted upon: the next step, the promotion, or the way back.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import transaction
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import CanaryStep, Release, ServedVersion
from controlplane.selectors.canary_outcomes import CanaryRows, canary_rows
from controlplane.services.alerts import alert_raise
from controlplane.services.clock import database_now
from controlplane.services.events import CONDUCTOR, Actor, event_append, lane_topic, require_reason
from controlplane.services.locks import replicas_lock
from controlplane.services.promotions import closed_because, release_promote_itself, require_open
from controlplane.services.quarantine import version_quarantine
from controlplane.services.releases import (
    release_close,
    release_locked,
    release_move,
    release_note,
    release_spec,
    seen_by_users,
)
from controlplane.services.residency import resident_require
from controlplane.services.work import work_cancel
from controlplane.states import AlertKind, Arm, CanaryVerdict, EventType, ReleaseState, WorkKind
from rl_core.shipping.canary import CanaryLook, Move, judge, step_follow
from rl_core.shipping.specs import CadenceSpec

SALT_BYTES = 32
REASON_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a canary: the rows, and what the statistics say of them."""

    step: CanaryStep
    rows: CanaryRows
    found: CanaryLook

    @property
    def reason(self) -> str:
        """Why, in words."""
        return ("; ".join(self.found.reasons) or self.found.verdict.value)[:REASON_CHARACTERS]

    def analysis(self) -> dict[str, Any]:
        """What is kept of it; JSON knows no infinity."""
        found: dict[str, Any] = finite(msgspec.to_builtins(self.found))
        return {
            **found,
            "exposures": [list(row) for row in self.rows.exposures],
            "matured": {arm.value: self.rows.matured.get(arm, 0) for arm in Arm},
        }


def finite(value: Any) -> Any:
    """The value with null in place of infinities and NaN, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@transaction.atomic
def canary_begin(*, release: Release, actor: Actor, reason: str = "") -> Release:
    """Let the candidate answer the first step's share of users. One experiment, one salt.

    Raises: Conflict in a freeze or a hold, while a replica lacks the candidate, or when the release has moved.
    """
    locked = release_locked(release, release.revision)
    spec = release_spec(locked)
    require_open(locked.lane, spec)
    resident_require(lane=locked.lane, version=locked.version)
    share = spec.canary.steps[0]
    release_move(
        locked,
        to=ReleaseState.CANARY,
        actor=actor,
        reason=reason or f"answers {share:.0%} of users",
        salt=secrets.token_hex(SALT_BYTES),
        share=share,
    )
    CanaryStep.objects.create(release=locked, position=0, share=share)
    ServedVersion.objects.create(lane=locked.lane, arm=Arm.CANARY, version=locked.version, release=locked)
    return locked


def canary_look(release: Release) -> Look | None:
    """Read and judge; nothing is locked or written. None when the release has no step under way."""
    step = release.steps.filter(ended_at__isnull=True).order_by("-position").first()
    if step is None:
        return None
    spec = release_spec(release)
    rows = canary_rows(release=release, spec=spec, step=step, now=database_now())
    return Look(step, rows, judge(spec.canary, rows.metrics, rows.exposures))


def canary_advance(*, release: Release) -> Release:
    """Look, and do what follows. A release that moved while it was looked at is left for the next look."""
    look = canary_look(release)
    return release if look is None else canary_conclude(release=release, look=look)


@transaction.atomic
def canary_conclude(*, release: Release, look: Look) -> Release:
    """Write down a look at the release as it was then, and act on it. Raises: StaleRevision when it has moved."""
    locked = release_locked(release, release.revision)
    if not seen_by_users(locked):
        raise Conflict(f"the release is {locked.state}: no user meets its candidate")
    step = locked.steps.get(pk=look.step.pk)
    spec, before = release_spec(locked), step.verdict
    held = _held_long_enough(step, spec, database_now())
    follows = step_follow(spec.canary, look.found, position=step.position, before=before, held=held)
    step.verdict = CanaryVerdict(follows.verdict)
    CanaryStep.objects.filter(pk=step.pk).update(verdict=step.verdict, analysis=look.analysis(), analysed_at=Now())
    if follows.move is Move.BACK or (follows.move is Move.DONE and spec.auto_promote):
        replicas_lock(locked.lane.project_id)
    if step.verdict != before:
        _announce(locked, step, look)
    if follows.move is Move.BACK:
        return _turn_back(locked, look)
    if locked.state != ReleaseState.CANARY or closed_because(locked.lane, spec):
        return locked
    if follows.move is Move.DONE and spec.auto_promote:
        return release_promote_itself(release=locked)
    if follows.move is Move.NEXT:
        return _next_step(locked, step, spec, actor=CONDUCTOR, reason="held long enough, and no harm shown")
    return locked


def _held_long_enough(step: CanaryStep, spec: CadenceSpec, now: datetime) -> bool:
    return now >= step.created_at + timedelta(seconds=spec.canary.hold_s)


def _next_step(release: Release, step: CanaryStep, spec: CadenceSpec, *, actor: Actor, reason: str) -> Release:
    position = step.position + 1
    share = spec.canary.steps[position]
    CanaryStep.objects.filter(pk=step.pk).update(ended_at=Now())
    CanaryStep.objects.create(release=release, position=position, share=share)
    return release_note(release, actor=actor, reason=f"answers {share:.0%} of users: {reason}", share=share)


def _turn_back(release: Release, look: Look) -> Release:
    """Harm was shown: users go back to the incumbent, its feedback is set aside, and a person is called."""
    version_quarantine(version=release.version)
    closed = release_close(release, to=ReleaseState.ROLLED_BACK, actor=CONDUCTOR, reason=look.reason)
    ratio = look.found.sample_ratio_p < release_spec(release).canary.sample_ratio_alpha
    alert_raise(
        lane=release.lane,
        kind=AlertKind.SAMPLE_RATIO if ratio else AlertKind.GUARDRAIL,
        subject=str(release.version.pk),
        detail={"release": str(release.pk), "reason": look.reason, "share": look.step.share},
        holds=ratio,  # with arms of the wrong size no experiment of the lane can be trusted
    )
    return closed


@transaction.atomic
def release_step_on(*, release: Release, actor: Actor, reason: str, expected_revision: int | None = None) -> Release:
    """A person's `advance`: the next step of the canary without waiting, or past a shadow that is not done.

    What a gate or a canary has to show before a promotion is not waived. Raises: Conflict where there is no next step.
    """
    require_reason(reason, "say why the release goes on now")
    locked = release_locked(release, expected_revision)
    spec = release_spec(locked)
    require_open(locked.lane, spec)
    if locked.state == ReleaseState.SHADOW and spec.canary.steps:
        work_cancel(kind=WorkKind.SHADOW, refs=[locked.pk])
        release_note(locked, actor=actor, reason=reason, shadow={"verdict": "waived", "detail": reason})
        return canary_begin(release=locked, actor=actor, reason=reason)
    step = locked.steps.filter(ended_at__isnull=True).order_by("-position").first()
    if locked.state != ReleaseState.CANARY or step is None:
        raise Conflict(f"the release is {locked.state}: there is no step to go on to")
    if step.position == len(spec.canary.steps) - 1:
        raise Conflict("this is the canary's last step: promote the release when it has passed, or abort it")
    return _next_step(locked, step, spec, actor=actor, reason=reason)


def _announce(release: Release, step: CanaryStep, look: Look) -> None:
    event_append(
        project_id=release.lane.project_id,
        topic=lane_topic(release.lane_id),
        event_type=EventType.CANARY_ANALYSED,
        actor=CONDUCTOR,
        reason=look.reason,
        data={
            "release": str(release.pk),
            "position": step.position,
            "share": f"{step.share:.0%}",
            "verdict": step.verdict,
            "users": {arm.value: look.rows.matured.get(arm, 0) for arm in Arm},
        },
    )
