"""The pointer that says which version answers a lane's users, moved forward by promotion and back by rollback."""

from __future__ import annotations

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from controlplane.errors import Conflict, StaleRevision
from controlplane.models import Lane, PolicyVersion, Release, ServedVersion
from controlplane.services.clock import database_now
from controlplane.services.events import CONDUCTOR, Actor, conductor_nudge, require_reason
from controlplane.services.gating import GateVerdict
from controlplane.services.lanes import lane_locked, lane_point, lane_record
from controlplane.services.locks import replicas_lock
from controlplane.services.quarantine import quarantined_in_line, version_quarantine
from controlplane.services.releases import (
    IN_FLIGHT,
    canary_close,
    release_close,
    release_locked,
    release_move,
    release_spec,
    seen_by_users,
)
from controlplane.services.residency import (
    candidate_load,
    loads_beside,
    promoted_place,
    resident_require,
    resident_somewhere,
    slots_relabel,
)
from controlplane.services.retention import version_hold
from controlplane.states import Arm, CanaryVerdict, ReleaseState, VersionState
from rl_core.shipping.freezes import frozen_at, thaws_at
from rl_core.shipping.specs import CadenceSpec


@transaction.atomic
def release_promote(*, release: Release, actor: Actor, reason: str, expected_revision: int | None = None) -> Release:
    """Let the candidate answer users. It is resident beside the incumbent already, so only the pointer moves.

    Raises: StaleRevision; Conflict without passed gate, shadow and canary, without enough approvals, in a freeze or a
    hold, or when a replica lacks the version.
    """
    locked = release_locked(release, expected_revision)
    require_passed(locked)
    others = sum(approval.user_id != locked.proposer_id for approval in locked.approvals.all())
    if others < locked.lane.approvals:
        raise Conflict(f"{locked.lane.approvals} approval(s) of others than the proposer are needed, {others} given")
    return _promote(locked, actor=actor, reason=reason)


@transaction.atomic
def release_promote_itself(*, release: Release) -> Release:
    """As the lane's cadence says with `auto_promote`: what passed is promoted, without a person. Raises: Conflict."""
    locked = release_locked(release, release.revision)
    require_passed(locked)
    if not release_spec(locked).auto_promote:
        raise Conflict("the lane's cadence does not promote by itself")
    return _promote(locked, actor=CONDUCTOR, reason="passed; the cadence promotes by itself")


def require_passed(release: Release) -> None:
    """Raises: Conflict when the candidate has not passed everything that its cadence asks for."""
    spec = release_spec(release)
    gate = release.gate.get("verdict", "not there yet")
    if gate != GateVerdict.PASS:
        raise Conflict(f"the gate's verdict is {gate}, not pass")
    if spec.canary.steps:
        last = release.steps.order_by("-position").first()
        verdict = last.verdict if last and last.position == len(spec.canary.steps) - 1 else "not there yet"
        if verdict != CanaryVerdict.PASS or release.state != ReleaseState.CANARY:
            raise Conflict(f"the canary's last step: verdict {verdict or 'not there yet'}, release {release.state}")
    elif spec.shadow.prompts and release.shadow.get("verdict") != CanaryVerdict.PASS:
        raise Conflict(f"the shadow's verdict is {release.shadow.get('verdict', 'not there yet')}, not pass")


def require_open(lane: Lane, spec: CadenceSpec) -> None:
    """More users may meet a candidate now. Raises: Conflict in a hold, a freeze, or while a rollback is under way."""
    reason = closed_because(lane, spec)
    if reason:
        raise Conflict(reason)


def closed_because(lane: Lane, spec: CadenceSpec) -> str:
    """Why no further user may meet a candidate now; empty when they may."""
    if lane.rollback_to_id is not None:
        return "the lane is being rolled back; wait until it serves the older version"
    if lane.hold_reason:
        return f"the lane is held: {lane.hold_reason}; resolve the alert first"
    now = database_now()
    if spec.freezes and frozen_at(spec, now) is not None:
        return f"the lane is frozen until {thaws_at(spec, now).isoformat()}"
    return ""


def _promote(release: Release, *, actor: Actor, reason: str) -> Release:
    lane = release.lane
    require_open(lane, release_spec(release))
    if lane.promoted_version_id != release.incumbent_id:
        raise Conflict("the lane serves another version than the candidate was compared with")
    resident_require(lane=lane, version=release.version)
    replicas_lock(lane.project_id)
    canary_close(release)
    release_move(
        release,
        to=ReleaseState.PROMOTED,
        actor=actor,
        reason=reason,
        promoted_at=Now(),
        finished_at=Now(),
        share=0.0,
        outcome=reason[:500],
    )
    lane_point(lane=lane, version=release.version, release=release, actor=actor, reason=reason)
    slots_relabel(lane=lane, promoted=release.version)
    return release


@transaction.atomic
def release_rollback(*, release: Release, actor: Actor, reason: str, expected_revision: int | None = None) -> Release:
    """Let the incumbent answer again, all users or those of the canary. The bad version's feedback is quarantined.

    Raises: Conflict when no user meets the release's version now; Invalid without a reason.
    """
    require_reason(reason, "say why you roll back")
    locked = release_locked(release, expected_revision)
    lane = locked.lane
    if seen_by_users(locked):
        version_quarantine(version=locked.version)
        return release_close(locked, to=ReleaseState.ROLLED_BACK, actor=actor, reason=reason)
    promoted = locked.state == ReleaseState.PROMOTED and lane.promoted_version_id == locked.version_id
    if not promoted or locked.incumbent is None:
        raise Conflict("only the promoted release, or one in its canary, can be rolled back")
    lane_rollback(lane=lane, version=locked.incumbent, actor=actor, reason=reason)
    locked.refresh_from_db(fields=["state", "revision", "finished_at"])
    return locked


@transaction.atomic
def lane_rollback(
    *, lane: Lane, version: PolicyVersion, actor: Actor, reason: str, expected_revision: int | None = None
) -> Lane:
    """Let an earlier version answer again: at once when a replica holds it, else as soon as one has loaded it beside.

    Where none can, for want of a second slot, the pointer moves at once too, and replicas load the version in place of
    what they hold: until one has, requests are turned away. A release in flight ends; when the pointer moves, what
    answered before is quarantined with all its descendants and the feedback on it. Naming the version that answers now
    calls off a rollback that still waits.
    Raises: Conflict for a version that is not in good standing, never served here or is retired; StaleRevision;
    Invalid.
    """
    require_reason(reason, "say why you roll back")
    locked = lane_locked(lane.pk)
    if expected_revision is not None and locked.revision != expected_revision:
        raise StaleRevision(f"the lane is at revision {locked.revision}, not {expected_revision}; read it again")
    if version.pk == locked.promoted_version_id:
        return _call_off(locked, actor=actor, reason=reason)
    replicas_lock(locked.project_id)
    _require_good(locked, version)
    version_hold(version, good=True)
    for flying in locked.releases.filter(state__in=IN_FLIGHT):
        release_close(
            release_locked(flying),
            to=ReleaseState.SKIPPED,
            actor=actor,
            reason=f"lane rolled back to {version}: {reason}",
        )
    if not _waits(locked, version):
        return _turn_back(locked, version, actor=actor, reason=reason)
    Lane.objects.filter(pk=locked.pk).update(
        rollback_to=version, rollback_reason=f"{actor.name}: {reason}"[:500], revision=F("revision") + 1
    )
    lane_record(locked, actor=actor, reason=reason, change=f"rolls back to {version} once a replica holds it")
    candidate_load(lane=locked, version=version, actor=actor, reason=f"lane {locked.slug} rolls back to it")
    conductor_nudge()
    locked.refresh_from_db()
    return locked


@transaction.atomic
def lane_rollback_finish(*, lane: Lane) -> bool:
    """Move the pointer of a lane that waits to roll back, once there is nothing to wait for. Whether it moved."""
    locked = lane_locked(lane.pk)
    version = locked.rollback_to
    if version is None or _waits(locked, version):
        return False
    _turn_back(locked, version, actor=CONDUCTOR, reason=locked.rollback_reason)
    return True


def lanes_rolling_back() -> list[Lane]:
    """Lanes whose rollback waits for its version."""
    return list(Lane.objects.filter(rollback_to__isnull=False).order_by("pk"))


def _waits(lane: Lane, version: PolicyVersion) -> bool:
    """Whether what answers now goes on until a replica has loaded the version into its second slot."""
    return not resident_somewhere(lane=lane, version=version) and loads_beside(lane=lane)


def _require_good(lane: Lane, version: PolicyVersion) -> None:
    if version.state != VersionState.COMMITTED or quarantined_in_line(version) is not None:
        raise Conflict(f"version {version} is not in good standing: it, or an ancestor, is quarantined")
    if not ServedVersion.objects.filter(lane=lane, arm=Arm.PROMOTED, version=version).exists():
        raise Conflict(f"version {version} never answered all users of lane {lane.slug}; propose it instead")


def _call_off(lane: Lane, *, actor: Actor, reason: str) -> Lane:
    if lane.rollback_to_id is None:
        raise Conflict(f"version {lane.promoted_version} answers already")
    Lane.objects.filter(pk=lane.pk).update(rollback_to=None, rollback_reason="", revision=F("revision") + 1)
    lane_record(lane, actor=actor, reason=reason, change="rollback called off")
    lane.refresh_from_db()
    return lane


def _turn_back(lane: Lane, version: PolicyVersion, *, actor: Actor, reason: str) -> Lane:
    bad = lane.promoted_version
    assert bad is not None
    version_quarantine(version=bad)
    release = lane.releases.filter(state=ReleaseState.PROMOTED, version=bad).order_by("-promoted_at").first()
    if release is not None:
        release = release_locked(release)
        release_move(
            release, to=ReleaseState.ROLLED_BACK, actor=actor, reason=reason, finished_at=Now(), outcome=reason[:500]
        )
    Lane.objects.filter(pk=lane.pk).update(rollback_to=None, rollback_reason="")
    lane_point(lane=lane, version=version, release=release, actor=actor, reason=reason)
    slots_relabel(lane=lane, promoted=version)
    promoted_place(lane=lane)
    conductor_nudge()
    lane.refresh_from_db()
    return lane
