"""The shadow: recorded prompts are replayed on the candidate, and its answers compared with what users got.

No user sees a replayed answer; nothing of it is kept but counts. Only prompts whose users allowed at least evaluation
are replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from django.db import transaction

from controlplane.errors import Conflict
from controlplane.models import Generation, Release, RubricVersion
from controlplane.selectors.statistics import paired_interval
from controlplane.services.events import Actor
from controlplane.services.releases import release_close, release_locked, release_move, release_note, release_spec
from controlplane.services.residency import resident_require
from controlplane.services.work import Claim, work_enqueue, work_fenced, work_finish
from controlplane.states import ActorKind, Arm, CanaryVerdict, Consent, GenerationOutcome, ReleaseState, WorkKind

SHADOWER = Actor(ActorKind.WORKER, "shadow")
# Rates of an answer's behaviour that a candidate must not raise, and how each is read off its counts.
RISING = ("refusal", "question", "invalid_tool_calls")
LONGER = "tokens"
JUDGED = "rubric"
LEAST_ANSWERED = 0.5
# Answers differ far more in length than in kind: so many margins of relative change are what one is for a rate.
LENGTH_MARGINS = 5


@dataclass(frozen=True, slots=True)
class Replay:
    """One prompt's two answers, as counts; a grade where a rubric was asked and could say."""

    candidate: dict[str, int | bool]
    incumbent: dict[str, int | bool]
    candidate_grade: float | None = None
    incumbent_grade: float | None = None


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """What a worker is to replay."""

    release: Release
    prompts: list[Generation]
    max_tokens: int
    rubric: RubricVersion | None


@transaction.atomic
def shadow_begin(*, release: Release, actor: Actor) -> Release:
    """Want the prompts replayed. Raises: Conflict while a replica lacks the candidate, or when it has moved."""
    locked = release_locked(release, release.revision)
    resident_require(lane=locked.lane, version=locked.version)
    release_move(locked, to=ReleaseState.SHADOW, actor=actor, reason="recorded prompts are replayed")
    work_enqueue(kind=WorkKind.SHADOW, ref=locked.pk, project_id=locked.lane.project_id, max_failures=3)
    return locked


def shadow_plan(claim: Claim) -> ShadowPlan | None:
    """What to replay: the newest different prompts of the incumbent; None when it is no longer wanted."""
    release = Release.objects.select_related("lane__cluster", "lane__project", "version", "incumbent", "run").get(
        pk=claim.ref
    )
    paused = release.state == ReleaseState.PAUSED and release.paused_from == ReleaseState.SHADOW
    if (release.state != ReleaseState.SHADOW and not paused) or release.shadow:
        with work_fenced(claim):
            work_finish(claim)
        return None
    spec = release_spec(release).shadow
    rubrics = RubricVersion.objects.filter(rubric__project=release.lane.project_id, rubric__slug=spec.rubric)
    rubric = rubrics.select_related("rubric").order_by("-number").first() if spec.rubric else None
    return ShadowPlan(release, _prompts(release, spec.prompts), spec.max_tokens, rubric)


def _prompts(release: Release, count: int) -> list[Generation]:
    rows = Generation.objects.filter(
        lane=release.lane_id,
        version=release.incumbent_id,
        arm=Arm.PROMOTED,
        outcome=GenerationOutcome.ANSWERED,
        consent__in=[Consent.EVAL, Consent.TRAIN],
        erased_at__isnull=True,
    )
    seen: dict[str, Generation] = {}
    for row in rows.exclude(content_key="").order_by("-created_at")[: 5 * count]:
        seen.setdefault(row.prompt_hash or str(row.id), row)
    return list(seen.values())[:count]


def shadow_record(claim: Claim, *, asked: int, replays: Sequence[Replay]) -> Release:
    """Write down what the replay showed; the release goes on, or ends, with the conductor's next look.

    Raises: StaleFence; Conflict when the release is no longer in its shadow.
    """
    with transaction.atomic():
        release = release_locked(Release.objects.get(pk=claim.ref))  # first, as by whoever ends it and cancels the unit
        return _record(claim, release, asked=asked, replays=replays)


def _record(claim: Claim, release: Release, *, asked: int, replays: Sequence[Replay]) -> Release:
    with work_fenced(claim):
        if release.shadow or release.state not in (ReleaseState.SHADOW, ReleaseState.PAUSED):
            raise Conflict(f"the release is {release.state}: its shadow is over")
        found = shadow_compare(replays, asked=asked, margin=release_spec(release).shadow.margin)
        release_note(release, actor=SHADOWER, reason=found["detail"], shadow=found)
        work_finish(claim)
    return release


def shadow_compare(replays: Sequence[Replay], *, asked: int, margin: float) -> dict[str, Any]:
    """Compare in pairs: fail when a rate is shown to have risen by more than the margin, pass when none seems to have.

    Too few answers are no data: undecided. Length is compared relative to the incumbent's.
    """
    effects: dict[str, dict[str, float]] = {}
    for key in (*RISING, LONGER):
        pairs = [(_value(key, one.candidate), _value(key, one.incumbent)) for one in replays]
        effects.update(_effect(key, pairs))
    graded = [
        (one.candidate_grade, one.incumbent_grade)
        for one in replays
        if one.candidate_grade is not None and one.incumbent_grade is not None
    ]
    effects.update(_effect(JUDGED, graded))
    harms = {key: _harm(key, effect) for key, effect in effects.items()}
    failed = [key for key, (least, _) in harms.items() if least > margin]
    doubtful = [key for key, (_, seen) in harms.items() if seen > margin]
    verdict, detail = CanaryVerdict.PASS, f"{len(replays)} of {asked} prompts answered; no rate rose"
    if failed:
        verdict, detail = CanaryVerdict.FAIL, f"shown to have risen by more than {margin:g}: {', '.join(failed)}"
    elif len(replays) < 2 or len(replays) < LEAST_ANSWERED * asked:
        verdict, detail = CanaryVerdict.UNDECIDED, f"{len(replays)} of {asked} prompts were answered: no data, no pass"
    elif doubtful:
        verdict, detail = CanaryVerdict.UNDECIDED, f"may have risen by more than {margin:g}: {', '.join(doubtful)}"
    return {
        "verdict": verdict.value,
        "detail": detail,
        "asked": asked,
        "n": len(replays),
        "margin": margin,
        "effects": effects,
    }


def _value(key: str, counts: dict[str, int | bool]) -> float:
    value = counts.get(key, 0)
    return float(value) if key == LONGER else float(bool(value))


def _effect(key: str, pairs: Sequence[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Candidate minus incumbent with the interval of the paired differences; nothing without two pairs."""
    if len(pairs) < 2:
        return {}
    ours, theirs = fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)
    unit = max(theirs, 1.0) if key == LONGER else 1.0
    found = paired_interval([(candidate - incumbent) / unit for candidate, incumbent in pairs])
    return {
        key: {"candidate": ours, "incumbent": theirs, "difference": found.mean, "low": found.low, "high": found.high}
    }


def _harm(key: str, effect: dict[str, float]) -> tuple[float, float]:
    """How much worse it surely is, and how much it seems to be. A change of length is one in either direction."""
    low, high, seen = effect["low"], effect["high"], effect["difference"]
    if key == LONGER:
        return max(low, -high) / LENGTH_MARGINS, abs(seen) / LENGTH_MARGINS
    return (-high, -seen) if key == JUDGED else (low, seen)


@transaction.atomic
def shadow_conclude(*, release: Release, actor: Actor) -> Release:
    """End a release whose shadow was not passed: failed when harm was shown, skipped when nothing was.

    Raises: Conflict when the release has moved, or its shadow passed.
    """
    locked = release_locked(release, release.revision)
    verdict = locked.shadow.get("verdict")
    if locked.state != ReleaseState.SHADOW or verdict not in (CanaryVerdict.FAIL, CanaryVerdict.UNDECIDED):
        raise Conflict(f"the release is {locked.state}, its shadow {verdict or 'not there yet'}")
    to = ReleaseState.FAILED if verdict == CanaryVerdict.FAIL else ReleaseState.SKIPPED
    return release_close(locked, to=to, actor=actor, reason=f"shadow {verdict}: {locked.shadow['detail']}")


@transaction.atomic
def shadow_lost(*, release: Release, actor: Actor, reason: str) -> Release:
    """The replay died: there is no data, and no data is not a pass."""
    locked = release_locked(release, release.revision)
    if locked.state != ReleaseState.SHADOW or locked.shadow:
        raise Conflict(f"the release is {locked.state}: its shadow is over")
    return release_close(locked, to=ReleaseState.SKIPPED, actor=actor, reason=f"shadow: {reason}")
