"""Reads for the pages: what an act on a lane would reach, told before it is done."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from controlplane.models import CadenceSlot, Feedback, Generation, Lane, PolicyVersion, Release
from controlplane.services.clock import database_now
from controlplane.services.quarantine import version_family
from controlplane.services.releases import release_spec, seen_by_users
from controlplane.services.residency import loads_beside, resident_somewhere
from controlplane.services.slots import slot_open
from controlplane.services.transitions import sources_of
from controlplane.states import Arm, FeedbackState

BACK = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Blast:
    """What is reached. Texts are empty and numbers None where the act reaches nothing of the kind.

    `users` asked in the last day and will be answered by another version; `share` is theirs of all the lane's.
    """

    users: int = 0
    share: float = 0.0
    before: PolicyVersion | None = None
    after: PolicyVersion | None = None
    versions: int = 0
    feedback: int = 0
    note: str = ""

    @property
    def moves(self) -> bool:
        """Whether users are answered by another version."""
        return self.before is not None and self.after is not None and self.before.pk != self.after.pk


def active_users(lane: Lane) -> int:
    """Different users who asked in the last day."""
    recent = Generation.objects.filter(lane=lane, created_at__gt=database_now() - BACK).exclude(user_hash="")
    return recent.values("user_hash").distinct().count()


def blast_of_cadence(lane: Lane, verb: str) -> Blast:
    """Of pausing or resuming the cadence, running a slot now, or skipping one."""
    slot = slot_open(lane)
    stays = "Users notice nothing: the same version goes on answering."
    notes = {
        "pause": _under_way(slot, "goes on to its end") or "No slot is under way.",
        "resume": "The next slot opens an interval from now.",
        "run": "A run trains on the present window once its signals have matured, and its version is proposed.",
        "skip": _skipped(lane, slot),
    }
    release = slot.release if slot is not None and verb == "skip" else None
    if release is not None and seen_by_users(release):
        return _back_to_incumbent(release, note=notes["skip"])
    return Blast(note=f"{notes[verb]} {stays}".strip())


def _under_way(slot: CadenceSlot | None, what: str) -> str:
    return f"Slot {slot.number} is {slot.state} and {what}." if slot else ""


def _skipped(lane: Lane, slot: CadenceSlot | None) -> str:
    if slot is None:
        return "The next planned slot is given up; the one after it comes on its beat."
    ends = [word for word, row in (("its run", slot.run), ("its release", slot.release)) if row is not None]
    return f"Slot {slot.number} ends now" + (f", and {' and '.join(ends)} with it." if ends else ".")


def blast_of_release(release: Release, verb: str) -> Blast:
    """Of an act on a release."""
    lane = release.lane
    if verb == "promote":
        return Blast(
            users=active_users(lane), share=1.0 - release.share, before=lane.promoted_version, after=release.version
        )
    if verb == "advance":
        return _of_step(release)
    if verb == "rollback" and not seen_by_users(release):
        return blast_of_rollback(lane, release.incumbent)
    if verb in ("abort", "rollback") and seen_by_users(release):
        return _back_to_incumbent(release, quarantines=verb == "rollback")
    if verb in ("pause", "resume") and seen_by_users(release):
        return Blast(note=f"The {release.share:.0%} of users whom the candidate answers keep it.")
    return Blast(note="No user meets the candidate now.")


def _of_step(release: Release) -> Blast:
    """The share that the next step adds."""
    spec = release_spec(release).canary
    shares = [share for share in spec.steps if share > release.share]
    if not shares:
        return Blast(note="There is no further step.")
    return Blast(
        users=round(active_users(release.lane) * (shares[0] - release.share)),
        share=shares[0] - release.share,
        before=release.incumbent,
        after=release.version,
        note=f"The candidate then answers {shares[0]:.0%} of users.",
    )


def _back_to_incumbent(release: Release, *, quarantines: bool = False, note: str = "") -> Blast:
    """A canary ends: its users get the incumbent."""
    met = Generation.objects.filter(release=release, arm=Arm.CANARY).exclude(user_hash="")
    return Blast(
        users=met.values("user_hash").distinct().count(),
        share=release.share,
        before=release.version,
        after=release.incumbent,
        versions=len(version_family(release.version)) if quarantines else 0,
        feedback=_feedback_on(release.version) if quarantines else 0,
        note=note,
    )


def blast_of_rollback(lane: Lane, to: PolicyVersion | None) -> Blast:
    """Of letting an earlier version answer again."""
    before = lane.promoted_version
    if before is None or to is None:
        return Blast(note="Nothing answered before this version.")
    return Blast(
        users=active_users(lane),
        share=1.0,
        before=before,
        after=to,
        versions=len(version_family(before)),
        feedback=_feedback_on(before),
        note=_until_it_answers(lane, to),
    )


def _until_it_answers(lane: Lane, version: PolicyVersion) -> str:
    if resident_somewhere(lane=lane, version=version):
        return "A replica holds it: new requests get it at once."
    if loads_beside(lane=lane):
        return "No replica holds it now: the present version goes on answering until one does."
    return (
        "No replica holds it now, and none has a second slot for it: the present version stops answering at once, and "
        "requests are told to come again (503) until a replica has loaded it."
    )


def _feedback_on(version: PolicyVersion) -> int:
    """Events that a quarantine of the version would set aside."""
    generations = Generation.objects.filter(version=version).values("id")
    states = sources_of(FeedbackState.QUARANTINED)
    return Feedback.objects.filter(generation_id__in=generations, state__in=states).count()
