"""The gate: candidate and incumbent try the same tasks with the same seeds, and their rewards are compared in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from django.db import transaction

from controlplane.errors import Conflict, Invalid
from controlplane.models import Evaluation, PolicyVersion, Release, RubricVersion, Stage, TaskSet
from controlplane.selectors.statistics import paired_interval
from controlplane.selectors.task_sets import task_set_named
from controlplane.services.evaluations import evaluation_request
from controlplane.services.events import Actor
from controlplane.services.locks import replicas_lock
from controlplane.services.releases import release_close, release_locked, release_move, release_note, release_spec
from controlplane.services.residency import candidate_load
from controlplane.states import EvaluationState, ReleaseState
from rl_core.specs import RealtimeStage, RlStage


class GateVerdict(StrEnum):
    """What a gate says. Only `pass` lets a candidate on."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


_ENDS = {GateVerdict.FAIL: ReleaseState.FAILED, GateVerdict.INCONCLUSIVE: ReleaseState.SKIPPED}


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What a candidate and the incumbent are compared on."""

    task_set: TaskSet
    rubric_version: RubricVersion
    task_count: int
    temperature: float


@transaction.atomic
def gate_begin(*, release: Release, actor: Actor) -> Release:
    """Load the candidate beside the incumbent, and want both evaluated.

    A gate that cannot be planned fails the release: waiting would mend nothing. Raises: Conflict when no replica can
    hold two versions, or the release has moved.
    """
    locked = release_locked(release, release.revision)
    lane = locked.lane
    if locked.state != ReleaseState.PENDING:
        raise Conflict(f"the release is {locked.state}: its gate has begun")
    try:
        plan = gate_plan(locked)
    except Invalid as error:
        return release_close(locked, to=ReleaseState.FAILED, actor=actor, reason=f"no gate: {error}")
    assert locked.incumbent is not None
    replicas_lock(lane.project_id)
    release_move(locked, to=ReleaseState.GATING, actor=actor)
    candidate_load(lane=lane, version=locked.version, actor=actor, reason=f"candidate of lane {lane.slug}")
    locked.candidate_evaluation = _evaluation(locked, locked.version, plan)
    locked.incumbent_evaluation = _evaluation(locked, locked.incumbent, plan)
    locked.save(update_fields=["candidate_evaluation", "incumbent_evaluation"])
    return locked


def gate_plan(release: Release) -> GatePlan:
    """Task set, rubric version and count: the lane's, and where it names none, those of the run's last stage.

    Raises: Invalid when neither names them, when the project has no such task set or rubric any more, or when there is
    no incumbent to compare with.
    """
    if release.incumbent is None:
        raise Invalid("the lane has no incumbent to compare with")
    gate, project = release_spec(release).gate, release.lane.project
    stage = release.run.stages.order_by("-position").first() if release.run else None
    if stage is None and not (gate.task_set and gate.rubric):
        raise Invalid("a release needs the run that made its version, or a gate in the lane's cadence", field="run")
    slug, rubric = _names(stage)
    pinned = stage.task_set if stage and not gate.task_set else None
    task_set = pinned or task_set_named(project, gate.task_set or slug)
    graded = stage.rubric_version if stage and not gate.rubric else None
    rubrics = RubricVersion.objects.filter(rubric__project=project, rubric__slug=gate.rubric or rubric)
    rubric_version = graded or rubrics.order_by("-number").first()
    if task_set is None or rubric_version is None:
        wanted = f"task set {gate.task_set or slug!r} and rubric {gate.rubric or rubric!r}"
        raise Invalid(f"the gate needs {wanted} in this project", field="run")
    if gate.environment and task_set.environment != gate.environment:
        raise Invalid(f"task set {task_set.slug!r} is for {task_set.environment!r}, not {gate.environment!r}", "gate")
    return GatePlan(task_set, rubric_version, gate.tasks, gate.temperature)


def _names(stage: Stage | None) -> tuple[str, str]:
    if stage is None:
        return "", ""
    spec = msgspec.convert(stage.spec, type=RlStage | RealtimeStage)
    if isinstance(spec, RealtimeStage):
        return spec.evaluation_task_set, spec.evaluation_rubric
    return spec.task_set, spec.rubric


def _evaluation(release: Release, version: PolicyVersion, plan: GatePlan) -> Evaluation:
    return evaluation_request(
        project=release.lane.project,
        version=version,
        task_set=plan.task_set,
        rubric_version=plan.rubric_version,
        task_count=plan.task_count,
        temperature=plan.temperature,
    )


@transaction.atomic
def gate_judge(*, release: Release, actor: Actor) -> Release:
    """Compare candidate and incumbent once both are evaluated. A gate that is not passed ends the release.

    Fail ends it as failed, inconclusive as skipped: no data is not a pass. Raises: Conflict when it has moved.
    """
    locked = release_locked(release, release.revision)
    if locked.state != ReleaseState.GATING or locked.gate:
        raise Conflict("the release moved meanwhile; read it again")
    candidate, incumbent = locked.candidate_evaluation, locked.incumbent_evaluation
    if candidate is None or incumbent is None:
        return release
    if EvaluationState.FAILED in (candidate.state, incumbent.state):
        detail = "an evaluation failed; see its dead letters"
        gate: dict[str, Any] = {"verdict": GateVerdict.INCONCLUSIVE, "detail": detail}
    elif candidate.state != EvaluationState.DONE or incumbent.state != EvaluationState.DONE:
        return release
    else:
        gate = _gate(candidate, incumbent, margin=release_spec(locked).gate.margin)
    reason, end = gate_sentence(gate), _ENDS.get(gate["verdict"])
    if end is not None:
        replicas_lock(locked.lane.project_id)
    release_note(locked, actor=actor, reason=reason, gate=gate)
    return locked if end is None else release_close(locked, to=end, actor=actor, reason=reason)


def gate_sentence(gate: dict[str, Any]) -> str:
    """What the gate found, in words."""
    if "difference" not in gate:
        return f"gate {gate['verdict']}: {gate['detail']}"
    return (
        f"gate {gate['verdict']}: candidate − incumbent {gate['difference']:+.3f} [{gate['low']:+.3f}, "
        f"{gate['high']:+.3f}] on {gate['n']} tasks, margin {gate['margin']:g}"
    )


def judge_differences(differences: list[float], *, margin: float) -> dict[str, Any]:
    """Pass when the interval of the paired differences lies above -margin, fail when below it, else inconclusive.

    Fewer than two pairs are no data, and no data is not a pass.
    """
    if len(differences) < 2:
        detail = "fewer than two tasks were scored for both"
        return {"verdict": GateVerdict.INCONCLUSIVE, "n": len(differences), "detail": detail}
    result = paired_interval(differences)
    verdict = GateVerdict.INCONCLUSIVE
    if result.low > -margin:
        verdict = GateVerdict.PASS
    elif result.high < -margin:
        verdict = GateVerdict.FAIL
    return {
        "verdict": verdict,
        "n": result.n,
        "difference": result.mean,
        "low": result.low,
        "high": result.high,
        "margin": margin,
    }


def _gate(candidate: Evaluation, incumbent: Evaluation, *, margin: float) -> dict[str, Any]:
    ours, theirs = _rewards(candidate), _rewards(incumbent)
    differences = [ours[task] - theirs[task] for task in sorted(ours.keys() & theirs.keys())]
    gate = judge_differences(differences, margin=margin)
    return {**gate, "candidate_mean": candidate.mean_reward, "incumbent_mean": incumbent.mean_reward}


def _rewards(evaluation: Evaluation) -> dict[str, float]:
    rows = evaluation.groups.filter(mean_reward__isnull=False).values_list("task__key", "mean_reward")
    return {key: reward for key, reward in rows if reward is not None}
