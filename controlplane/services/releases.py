"""Releases: proposed, approved, paused, resumed, ended. How one moves is here; gate, shadow and canary are beside it.

    gating       the candidate against the incumbent on the same tasks
    shadows      recorded prompts replayed on the candidate; no user sees it
    canaries     steps of users, and the verdict of each look
    promotions   the pointer that says who answers, forward and back

Every move locks the lane, then the release, and rises its revision: of two people who act at once one wins, and the
other is refused with 409 or, when they named the revision that they saw, with 412.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from controlplane.errors import Conflict, Forbidden, Invalid, StaleRevision
from controlplane.models import Approval, CanaryStep, Lane, PolicyVersion, Release, Run, ServedVersion, User
from controlplane.services.events import Actor, conductor_nudge, event_append, lane_topic, require_reason
from controlplane.services.lanes import lane_locked
from controlplane.services.quarantine import quarantined_in_line
from controlplane.services.residency import candidate_withdraw
from controlplane.services.retention import version_hold
from controlplane.services.transitions import transition
from controlplane.services.window_returns import returned_note, window_return
from controlplane.services.work import work_cancel
from controlplane.states import Arm, EventType, ReleaseState, VersionState, WorkKind
from rl_core.shipping.specs import CadenceSpec, CanarySpec, GateSpec, cadence_parse

IN_FLIGHT = (
    ReleaseState.PENDING,
    ReleaseState.GATING,
    ReleaseState.SHADOW,
    ReleaseState.CANARY,
    ReleaseState.PAUSED,
)
# Where no user has met the candidate yet: a newer one may take its place.
UNSEEN = (ReleaseState.PENDING, ReleaseState.GATING, ReleaseState.SHADOW)
ENDED = (ReleaseState.SKIPPED, ReleaseState.FAILED, ReleaseState.ROLLED_BACK, ReleaseState.PROMOTED)


def release_propose(
    *,
    lane: Lane,
    version: PolicyVersion,
    run: Run | None,
    proposer: User | None,
    actor: Actor,
    reason: str,
    supersede: bool = False,
) -> Release:
    """Put a committed version on its way to the lane's users.

    With `supersede` a release in flight that no user has met yet is skipped for it. Raises: Invalid for a version that
    is not committed, quarantined, of another model or already promoted; Conflict while another release is in flight, or
    for a version that is retired.
    """
    _check_candidate(lane, version)
    require_reason(reason, "say why: a release needs a reason")
    with transaction.atomic():
        version_hold(version)
        locked = lane_locked(lane.pk)
        if version.id == locked.promoted_version_id:
            raise Invalid("the version is the promoted one already", field="version")
        flying = locked.releases.filter(state__in=IN_FLIGHT).first()
        if flying is not None:
            if not supersede or flying.state not in UNSEEN:
                raise Conflict(f"lane {locked.slug} has a release in flight already; end it first")
            older = release_locked(flying)
            release_close(older, to=ReleaseState.SKIPPED, actor=actor, reason=f"superseded by version {version}")
        release = Release.objects.create(
            lane=locked,
            version=version,
            incumbent=locked.promoted_version,
            run=run,
            proposer=proposer,
            reason=reason[:500],
            spec=locked.cadence,
        )
        release_record(release, actor=actor, reason=reason)
        conductor_nudge()
    return release


def _check_candidate(lane: Lane, version: PolicyVersion) -> None:
    if version.state != VersionState.COMMITTED:
        raise Invalid(f"version {version} is not committed", field="version")
    tainted = quarantined_in_line(version)
    if tainted is not None:
        raise Invalid(f"version {version} is quarantined, or descends from {tainted}, which is", field="version")
    if version.lineage.model_id != lane.model_id:
        raise Invalid("the version descends from another model than the lane serves", field="version")


def release_locked(release: Release, expected_revision: int | None = None) -> Release:
    """The release as it is now, its lane and itself locked. Raises: StaleRevision when it is not the one seen."""
    lane = lane_locked(release.lane_id)
    row = (
        Release.objects.select_for_update(of=("self",), no_key=True)
        .select_related("version__lineage", "incumbent", "run", "candidate_evaluation", "incumbent_evaluation")
        .get(pk=release.pk)
    )
    row.lane = lane
    if expected_revision is not None and row.revision != expected_revision:
        raise StaleRevision(f"the release is at revision {row.revision}, not {expected_revision}; read it again")
    return row


def release_spec(release: Release) -> CadenceSpec:
    """The cadence that the release goes by: the lane's as it was when it began.

    A lane without one gates by hand: no shadow, no canary, its own margin.
    """
    if release.spec:
        return cadence_parse(release.spec)
    gate = GateSpec(tasks=_stage_tasks(release), margin=release.lane.non_inferiority_margin)
    return CadenceSpec(gate=gate, canary=CanarySpec(steps=()))


def _stage_tasks(release: Release) -> int:
    stage = release.run.stages.order_by("-position").first() if release.run else None
    return int(stage.spec.get("eval_tasks", GateSpec().tasks)) if stage else GateSpec().tasks


def release_move(release: Release, *, to: ReleaseState, actor: Actor, reason: str = "", **changes: Any) -> Release:
    """Change a locked release's state, with its event. Raises: IllegalTransition, Conflict."""
    transition(release, to=to, revision=F("revision") + 1, **changes)
    release.refresh_from_db(fields=["revision", *changes])
    release_record(release, actor=actor, reason=reason)
    conductor_nudge()
    return release


def release_note(release: Release, *, actor: Actor, reason: str = "", **changes: Any) -> Release:
    """Write changes of a locked release that stays in its state, with its event."""
    Release.objects.filter(pk=release.pk).update(revision=F("revision") + 1, **changes)
    release.refresh_from_db(fields=["revision", *changes])
    release_record(release, actor=actor, reason=reason)
    conductor_nudge()
    return release


def release_close(release: Release, *, to: ReleaseState, actor: Actor, reason: str) -> Release:
    """End a locked release that was not promoted: no user meets the candidate any more, and no replica keeps it.

    What a skipped candidate was trained on goes back: nothing was shown of it, and the next may learn from it. What one
    that failed or was rolled back learned from stays spent, as it may be what was wrong with it.
    """
    if to == ReleaseState.SKIPPED and release.run is not None:
        reason += returned_note(window_return(run=release.run))
    candidate_withdraw(lane=release.lane, version=release.version, actor=actor)
    work_cancel(kind=WorkKind.SHADOW, refs=[release.pk])
    canary_close(release)
    return release_move(release, to=to, actor=actor, reason=reason, finished_at=Now(), share=0.0, outcome=reason[:500])


def canary_close(release: Release) -> None:
    """The canary is over, however it went: its step ends, and its arm serves nobody."""
    CanaryStep.objects.filter(release=release, ended_at__isnull=True).update(ended_at=Now())
    ServedVersion.objects.filter(release=release, arm=Arm.CANARY, until__isnull=True).update(until=Now())


@transaction.atomic
def release_approve(
    *, release: Release, user: User, actor: Actor, reason: str, expected_revision: int | None = None
) -> Approval:
    """One person's word for a release. Raises: Forbidden for its proposer; Conflict when it has ended."""
    require_reason(reason, "say why you approve")
    locked = release_locked(release, expected_revision)
    if locked.proposer_id == user.id:
        raise Forbidden("a release is approved by people other than its proposer")
    if locked.state in ENDED:
        raise Conflict(f"the release is {locked.state}")
    approval, created = Approval.objects.get_or_create(release=locked, user=user, defaults={"reason": reason[:500]})
    if created:
        event_append(
            project_id=locked.lane.project_id,
            topic=lane_topic(locked.lane_id),
            event_type=EventType.RELEASE_APPROVED,
            actor=actor,
            reason=reason,
            data={"release": str(locked.id), "approvals": locked.approvals.count()},
        )
    return approval


@transaction.atomic
def release_pause(*, release: Release, actor: Actor, reason: str, expected_revision: int | None = None) -> Release:
    """Stand still: no further step, no promotion. A canary's arms stay as they are, and its guardrails are watched."""
    require_reason(reason, "say why you pause the release")
    locked = release_locked(release, expected_revision)
    return release_move(
        locked, to=ReleaseState.PAUSED, actor=actor, reason=reason, paused_from=ReleaseState(locked.state)
    )


@transaction.atomic
def release_resume(*, release: Release, actor: Actor, reason: str, expected_revision: int | None = None) -> Release:
    """Go on from where it was paused. Raises: Conflict when it is not paused."""
    require_reason(reason, "say why you resume the release")
    locked = release_locked(release, expected_revision)
    if locked.state != ReleaseState.PAUSED:
        raise Conflict(f"the release is {locked.state}: only a paused one can be resumed")
    return release_move(locked, to=ReleaseState(locked.paused_from), actor=actor, reason=reason, paused_from="")


@transaction.atomic
def release_end(*, release: Release, actor: Actor, reason: str, expected_revision: int | None = None) -> Release:
    """Skip a release that is in flight: one person and a reason are enough. Raises: Conflict when it has ended."""
    require_reason(reason, "say why the release ends")
    locked = release_locked(release, expected_revision)
    if locked.state in ENDED:
        raise Conflict(f"the release is {locked.state}: it cannot be aborted")
    return release_close(locked, to=ReleaseState.SKIPPED, actor=actor, reason=reason)


def seen_by_users(release: Release) -> bool:
    """Whether the candidate answers some users now, paused or not."""
    return release.state == ReleaseState.CANARY or (
        release.state == ReleaseState.PAUSED and release.paused_from == ReleaseState.CANARY
    )


def release_record(release: Release, *, actor: Actor, reason: str = "") -> None:
    """Append the release's present state to its lane's log."""
    event_append(
        project_id=release.lane.project_id,
        topic=lane_topic(release.lane_id),
        event_type=EventType.RELEASE_CHANGED,
        actor=actor,
        reason=reason,
        data={
            "release": str(release.id),
            "lane": str(release.lane_id),
            "version": str(release.version),
            "state": release.state,
            "verdict": release.gate.get("verdict"),
            "share": release.share,
            "revision": release.revision,
        },
    )
