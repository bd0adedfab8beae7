"""A lane with a cadence, its candidates and its users, played by the tests; conductor, services and rows are real."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db.models import F, Value
from django.db.models.functions import Now

from controlplane.conductor.shipping import advance_lanes, look_at_canaries
from controlplane.models import (
    CadenceSlot,
    CanaryStep,
    Evaluation,
    Generation,
    Lane,
    PolicyVersion,
    Release,
    ReplicaSlot,
    RolloutGroup,
    Run,
    ServedVersion,
    Stage,
    Topic,
)
from controlplane.selectors.lane_routes import lane_route
from controlplane.services.cadence import cadence_update
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.clock import database_now
from controlplane.services.generations import Answer, generation_record
from controlplane.services.releases import IN_FLIGHT, release_propose, seen_by_users
from controlplane.services.runs import run_create
from controlplane.states import (
    Arm,
    Consent,
    EvaluationState,
    GenerationOutcome,
    GroupState,
    ReleaseState,
    RunState,
    SlotState,
    StageState,
)
from rl_core.store import ObjectStore, open_store
from rl_core.types import FinishReason, Generated, SamplingParams, VersionSpan
from tests.domain_factories import CRITERIA, make_tasks
from tests.lane_rows import ACTOR, LaneWorld, candidate_version, lane_world, person

GOAL = {"name": "reward", "source": "signal_reward", "role": "goal", "direction": "higher", "margin": 0.1}
FAILURES = {"name": "failures", "source": "failure", "role": "guardrail", "direction": "lower", "margin": 0.05}


def canary_spec(**changes: Any) -> dict[str, Any]:
    """Two quick steps; reward is the goal, failures a guardrail."""
    values: dict[str, Any] = {
        "steps": [0.2, 0.5],
        "hold_s": 0.0,
        "minimum_users": 5,
        "metrics": [GOAL, FAILURES],
    }
    return {**values, **changes}


def cadence_spec(**changes: Any) -> dict[str, Any]:
    """A cadence by hand whose feedback matures at once."""
    values: dict[str, Any] = {"horizon_s": 0.0, "canary": canary_spec(), "gate": {"tasks": 3, "margin": 0.1}}
    return {**values, **changes}


def set_cadence(world: LaneWorld, **changes: Any) -> Lane:
    """Give the world's lane a cadence."""
    lane = Lane.objects.get(pk=world.lane.pk)
    world.lane = cadence_update(lane=lane, cadence=cadence_spec(**changes), actor=ACTOR, reason="test")
    return world.lane


def shipping_world(*, approvals: int = 1, **cadence: Any) -> LaneWorld:
    """A lane with a cadence in a project that has tasks and a rubric to gate on."""
    world = lane_world(approvals=approvals)
    tasks = make_tasks(train=2, heldout=3)
    task_set_create(project=world.project, slug="word-problems", environment="word-problems", tasks=tasks, actor=ACTOR)
    rubric_publish(project=world.project, slug="word-problems", criteria=CRITERIA, author=None, note="", actor=ACTOR)
    set_cadence(world, **cadence)
    return world


def make_run(world: LaneWorld, *, state: RunState = RunState.COMPLETED, root: str = "") -> Run:
    """A run from the promoted version that has made one version, as if it had been trained."""
    run = run_create(
        project=world.project,
        name=f"run {uuid.uuid4().hex[:6]}",
        spec={"model": "tiny", "stages": [{"kind": "realtime", "lane": world.lane.slug, "eval_tasks": 3}]},
        actor=ACTOR,
        parent_version=Lane.objects.get(pk=world.lane.pk).promoted_version,
    )
    finish_run(run, state=state, root=root)
    return Run.objects.get(pk=run.pk)


def finish_run(run: Run, *, state: RunState = RunState.COMPLETED, root: str = "") -> PolicyVersion:
    """What conductor and workers do: the run ends, its head is a committed version."""
    version = PolicyVersion.objects.create(
        lineage=run.lineage,
        epoch=0,
        number=1,
        state="committed",
        parent=run.lineage.head,
        root=root or uuid.uuid4().hex * 2,
        manifest_key="m.json",
        committed_at=Now(),
    )
    type(run.lineage).objects.filter(pk=run.lineage.pk).update(head=version)
    Stage.objects.filter(run=run).update(state=StageState.COMPLETED)
    Run.objects.filter(pk=run.pk).update(state=state, finished_at=Now())
    return version


def propose(world: LaneWorld, *, version: PolicyVersion | None = None, **changes: Any) -> Release:
    """A person proposes a candidate."""
    run = None if version is not None else make_run(world)
    values: dict[str, Any] = {"proposer": person("proposer"), "actor": ACTOR, "reason": "better", "run": run, **changes}
    chosen = version or (run.lineage.head if run else candidate_version(world))
    return release_propose(lane=Lane.objects.get(pk=world.lane.pk), version=chosen, **values)


def evaluate(release: Release, *, candidate: float = 0.6, incumbent: float = 0.5, tasks: int = 3) -> None:
    """What rollout and score workers do for a gate: every task of both is graded."""
    release.refresh_from_db()
    for evaluation, reward in ((release.candidate_evaluation, candidate), (release.incumbent_evaluation, incumbent)):
        assert evaluation is not None
        chosen = evaluation.task_set.tasks.filter(split="heldout").order_by("position")[:tasks]
        for position, task in enumerate(chosen):
            RolloutGroup.objects.get_or_create(
                evaluation=evaluation,
                position=position,
                defaults={
                    "task": task,
                    "purpose": "evaluation",
                    "state": GroupState.CONSUMED,
                    "draw": position,
                    "size": 1,
                    "seed": 0,
                    "admitted_version": evaluation.version,
                    "mean_reward": reward,
                },
            )
        Evaluation.objects.filter(pk=evaluation.pk).update(state=EvaluationState.DONE, mean_reward=reward)


def transfers_arrive(world: LaneWorld) -> None:
    """What transfer workers do: every slot holds what it is told to."""
    slots = ReplicaSlot.objects.filter(replica__cluster=world.cluster, desired_version__isnull=False)
    slots.update(current_version=F("desired_version"))


def to_canary(world: LaneWorld, release: Release | None = None) -> Release:
    """Take a candidate through a passed gate to its canary's first step."""
    release = release or propose(world)
    advance_lanes()
    transfers_arrive(world)
    evaluate(release)
    advance_lanes()
    advance_lanes()
    release = Release.objects.get(pk=release.pk)
    assert release.state == ReleaseState.CANARY, (release.state, release.outcome)
    return release


@dataclass
class Users:
    """Users of a lane. Each asks once when told to; the gateway's own routing says which version answers."""

    world: LaneWorld
    store: ObjectStore = field(default_factory=lambda: open_store("memory:///"))

    def ask(self, user_key: str, **changes: Any) -> Generation:
        """One request, routed as the gateway routes, and recorded."""
        route = lane_route(project_id=self.world.project.pk, slug=self.world.lane.slug)
        assert route is not None
        side, assignment = route.assign(user_key)
        outcome = changes.pop("outcome", GenerationOutcome.ANSWERED)
        text = "" if outcome == GenerationOutcome.FAILED else changes.pop("text", "A short answer.")
        tokens = [5, 6, 7] if text else []
        generated = Generated(
            token_ids=tokens,
            logprobs=[-0.1] * len(tokens),
            text=text,
            finish_reason=FinishReason.STOP,
            spans=[VersionSpan(0, len(tokens), str(side.version))] if tokens else [],
            prompt_tokens=2,
        )
        answer = Answer(
            generation_id=changes.pop("generation_id", None) or uuid.uuid4(),
            messages=[{"role": "user", "content": changes.pop("content", "Say hello")}],
            prompt_token_ids=changes.pop("prompt", [1, 2]),
            generated=generated,
            sampling=SamplingParams(max_tokens=8),
            latency_ms=changes.pop("latency_ms", 20.0),
            outcome=outcome,
        )
        values: dict[str, Any] = {"session": "", "consent": Consent.NONE, **changes}
        return generation_record(
            lane=route.lane,
            version=side.version,
            answer=answer,
            user_key=user_key,
            store=self.store,
            assignment=assignment,
            **values,
        )


def step_of(release: Release) -> CanaryStep:
    """The newest step."""
    step = release.steps.order_by("-position").first()
    assert step is not None
    return step


def age(row: Any, seconds: float, *fields: str) -> None:
    """Let moments of a row lie that much earlier: the database's clock cannot be set forward."""
    names = fields or ("created_at",)
    changes: dict[str, Any] = {name: F(name) - Value(timedelta(seconds=seconds)) for name in names}
    type(row)._default_manager.filter(pk=row.pk).update(**changes)


def look() -> None:
    """The conductor looks at every canary once."""
    look_at_canaries()


def lane_of(world: LaneWorld) -> Lane:
    """The lane as it is now."""
    return Lane.objects.select_related("promoted_version", "project", "cluster").get(pk=world.lane.pk)


def make_due(world: LaneWorld) -> None:
    """As if the interval had passed."""
    due = database_now() - timedelta(seconds=1)
    Lane.objects.filter(pk=world.lane.pk).update(next_slot_at=due)


def slot_of(world: LaneWorld) -> CadenceSlot:
    """The newest slot."""
    slot = CadenceSlot.objects.filter(lane=world.lane).order_by("-number").first()
    assert slot is not None
    return slot


def assert_sound(lane: Lane) -> None:
    """What holds of a lane after every move, whoever made it."""
    lane = Lane.objects.get(pk=lane.pk)
    releases = list(lane.releases.all())
    assert sum(release.state in IN_FLIGHT for release in releases) <= 1
    for release in releases:
        seen = seen_by_users(release)
        assert (release.share > 0) == seen, (release.state, release.share)
        assert release.steps.filter(ended_at__isnull=True).count() == int(seen), release.state
        served = ServedVersion.objects.filter(release=release, arm=Arm.CANARY, until__isnull=True)
        assert served.count() == int(seen), release.state
        assert (release.finished_at is None) == (release.state in IN_FLIGHT), release.state
        assert bool(release.outcome) == (release.state not in IN_FLIGHT), release.state
    serving = ServedVersion.objects.get(lane=lane, arm=Arm.PROMOTED, until__isnull=True)
    assert serving.version_id == lane.promoted_version_id
    assert lane.cadence_slots.filter(state__in=[SlotState.OPEN, SlotState.TRAINING, SlotState.RELEASING]).count() <= 1
    wished = ReplicaSlot.objects.filter(replica__cluster=lane.cluster_id, desired_version__quarantined_at__isnull=False)
    assert not wished.exists()
    for topic in Topic.objects.filter(project=lane.project_id):
        assert list(topic.events.order_by("seq").values_list("seq", flat=True)) == list(range(1, topic.seq + 1))


def put_in(release: Release, state: ReleaseState, paused_from: str = "") -> Release:
    """Put a release into a state by its rows, with everything that the state needs."""
    canary = ReleaseState.CANARY in (state, paused_from)
    late = canary or ReleaseState.SHADOW in (state, paused_from) or state == ReleaseState.PROMOTED
    ended = state not in IN_FLIGHT
    Release.objects.filter(pk=release.pk).update(
        state=state,
        paused_from=paused_from,
        gate={"verdict": "pass", "difference": 0.1} if late else {},
        share=0.2 if canary else 0.0,
        salt="salt" if canary else "",
        outcome="it did" if ended else "",
        finished_at=Now() if ended else None,
        promoted_at=Now() if state == ReleaseState.PROMOTED else None,
    )
    if canary:
        CanaryStep.objects.create(release=release, position=0, share=0.2)
        ServedVersion.objects.create(lane=release.lane, arm=Arm.CANARY, version=release.version, release=release)
    if state == ReleaseState.PROMOTED:
        ServedVersion.objects.filter(lane=release.lane, until__isnull=True).update(until=Now())
        ServedVersion.objects.create(lane=release.lane, version=release.version, release=release)
        Lane.objects.filter(pk=release.lane_id).update(promoted_version=release.version)
    return Release.objects.get(pk=release.pk)
