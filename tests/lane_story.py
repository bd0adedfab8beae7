"""A lane with a past, as its pages show it: slots, releases, a canary under way, feedback of several senders, alerts.

Conductor, services and rows are real; `tests.shipping_rig` plays users and workers.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.conductor.shipping import advance_lanes
from controlplane.errors import ControlPlaneError
from controlplane.models import (
    Alert,
    CadenceSlot,
    FeedbackSource,
    Generation,
    Lane,
    PolicyVersion,
    Release,
    Run,
    Step,
)
from controlplane.services.alerts import alert_raise
from controlplane.services.events import Actor
from controlplane.services.feedback import Sender, feedback_receive_many
from controlplane.services.promotions import release_promote, release_rollback
from controlplane.services.rejections import Refused, payloads_reject
from controlplane.services.releases import release_approve
from controlplane.services.signals import signal_define, signal_map_publish
from controlplane.services.sources import source_create
from controlplane.services.tenancy import user_create
from controlplane.services.windows import window_collect
from controlplane.states import (
    ActorKind,
    AlertKind,
    Arm,
    Consent,
    MemberRole,
    PayloadKind,
    ReleaseState,
    SignalType,
    SlotState,
)
from tests.factories import PASSWORD, Workspace
from tests.lane_rows import ACTOR, LaneWorld, thumbs
from tests.shipping_rig import (
    Users,
    age,
    canary_spec,
    evaluate,
    look,
    make_run,
    propose,
    set_cadence,
    shipping_world,
    to_canary,
    transfers_arrive,
)

FIVE_HOURS = 18_000.0
MONITORS = {"minimum": 10, "threshold": 0.1, "divergence": 0.15}


@dataclass
class Story:
    """A lane and who works on it. `flying` is in its canary, `alert` is open and holds the lane."""

    workspace: Workspace
    world: LaneWorld
    users: Users
    flying: Release | None = None
    alert: Alert | None = None

    @property
    def lane(self) -> Lane:
        """The lane as it is now."""
        return Lane.objects.select_related("promoted_version", "project").get(pk=self.world.lane.pk)

    def answer(self, count: int, *, first: int = 0, like: float = 0.6, seed: int = 1, **changes: Any) -> None:
        """Users ask once each; most of them say what they think, the candidate's a little more kindly."""
        luck = random.Random(seed)
        rows: list[tuple[Generation, bool]] = []
        for number in range(first, first + count):
            text = (
                "I'm sorry, but I cannot help with that."
                if luck.random() < 0.1
                else "A " + "short " * luck.randrange(9)
            )
            latency = luck.gauss(40.0, 8.0)
            generation = self.users.ask(
                f"user-{number}", consent=Consent.TRAIN, text=text, latency_ms=latency, **changes
            )
            liked = luck.random() < like + (0.1 if generation.arm == Arm.CANARY else 0.0)
            if luck.random() < 0.8:
                rows.append((generation, liked))
        self.send(rows)

    def send(self, rows: list[tuple[Generation, bool]], source: FeedbackSource | None = None) -> None:
        """Thumbs on generations."""
        name = source.slug if source else "product"
        sender = Sender(self.world.project, name, Actor(ActorKind.SYSTEM, name), source)
        items: list[Any] = [
            thumbs(generation.id, value=liked, actor={"hash": f"a{index}", "kind": "user"})
            for index, (generation, liked) in enumerate(rows)
        ]
        for outcome in feedback_receive_many(sender=sender, items=items) if items else []:
            assert not isinstance(outcome, ControlPlaneError), outcome


def empty_lane(*, cadence: bool = False) -> Story:
    """A lane that nothing happened on, with people."""
    world = shipping_world()
    if not cadence:
        Lane.objects.filter(pk=world.lane.pk).update(cadence={})
    return Story(_people(world), world, Users(world))


def _people(world: LaneWorld) -> Workspace:
    slug = uuid.uuid4().hex[:8]
    people = {
        role.value: user_create(
            project=world.project, username=f"{role.value}-{slug}", password=PASSWORD, role=role, actor=ACTOR
        )
        for role in MemberRole
    }
    return Workspace(world.project, people["owner"], people)


def lane_story(*, hostile: str = "", users: int = 120) -> Story:
    """Everything that a lane's pages can show, and `hostile` wherever others can write."""
    story = empty_lane()
    world = story.world
    signal_define(project=world.project, slug="score", value_type=SignalType.NUMBER, minimum=0.0, maximum=10.0)
    signal_define(project=world.project, slug="mood", value_type=SignalType.CATEGORY, categories=["good", "bad"])
    canary = canary_spec(steps=[0.5], minimum_users=5, metrics=_metrics(0.9))
    set_cadence(world, interval_s=FIVE_HOURS, canary=canary, monitors=MONITORS)
    story.answer(users, seed=1)
    _skipped_slot(story)
    _promoted(story, users=users)
    _rolled_back(story, hostile)
    freezes = [{"kind": "weekly", "days": [5, 6]}, {"kind": "date", "date": "2026-12-25"}]
    canary = canary_spec(steps=[0.2, 0.5], hold_s=3600.0, minimum_users=5, metrics=_metrics(0.3))
    shadow = {"prompts": 20, "margin": 0.1}
    set_cadence(world, interval_s=FIVE_HOURS, minimum_signals=40, canary=canary, monitors=MONITORS, freezes=freezes)
    story.flying = _in_canary(story, hostile, users=users, shadow=shadow)
    _senders(story, hostile)
    story.alert = alert_raise(
        lane=story.lane,
        kind=AlertKind.BEHAVIOUR,
        subject=f"{story.flying.version_id}:refusal",
        detail={
            "about": f"refusal of version 0-1 {hostile}",
            "reason": f"refusal: 0.02 before, 0.21 now {hostile}",
            "before": 0.02,
            "now": 0.21,
        },
        holds=True,
    )
    return story


def _metrics(margin: float) -> list[dict[str, Any]]:
    return [
        {"name": "reward", "source": "signal_reward", "role": "goal", "direction": "higher", "margin": margin},
        {"name": "failures", "source": "failure", "role": "guardrail", "direction": "lower", "margin": 0.05},
        {"name": "latency", "source": "latency", "role": "guardrail", "direction": "lower", "margin": 20.0},
    ]


def _skipped_slot(story: Story) -> None:
    now = datetime.now(UTC)
    CadenceSlot.objects.create(
        lane=story.lane,
        number=1,
        state=SlotState.SKIPPED,
        due_at=now - timedelta(hours=10),
        deadline_at=now - timedelta(hours=6),
        reason="undecided at its deadline: waits for signals: 12 of 40 have matured",
        finished_at=now - timedelta(hours=6),
    )


def _slot(story: Story, release: Release, state: SlotState, *, hours: float) -> CadenceSlot:
    last = story.lane.cadence_slots.order_by("-number").first()
    now = datetime.now(UTC)
    return CadenceSlot.objects.create(
        lane=story.lane,
        number=last.number + 1 if last else 1,
        state=state,
        due_at=now - timedelta(hours=hours),
        deadline_at=now + timedelta(hours=15),
        run=release.run,
        release=release,
        reason="its release is promoted: shown to be no worse" if state == SlotState.DONE else "the release is canary",
        finished_at=now if state == SlotState.DONE else None,
    )


def _trained(story: Story) -> Run:
    """A completed run whose one step says what its window held."""
    run = make_run(story.world)
    head = PolicyVersion.objects.get(pk=run.lineage.head_id)
    window = window_collect(lane=story.lane)
    Step.objects.create(
        run=run,
        stage=run.stages.get(),
        number=1,
        state="published",
        base_version=head.parent or head,
        version=head,
        window=window.report(),
    )
    PolicyVersion.objects.filter(pk=head.pk).update(delta_bytes=2_400_000, full_bytes=269_000_000)
    return run


def _proposed(story: Story, reason: str) -> Release:
    run = _trained(story)
    return propose(story.world, version=run.lineage.head, run=run, reason=reason)


def _through(story: Story, *, users: int, reason: str = "better") -> Release:
    """A candidate in its canary that users met."""
    release = to_canary(story.world, _proposed(story, reason))
    story.answer(users, first=100, like=0.7, seed=2)
    look()
    return Release.objects.get(pk=release.pk)


def _promoted(story: Story, *, users: int) -> Release:
    release = _through(story, users=users)
    _slot(story, release, SlotState.DONE, hours=5)
    release_approve(release=release, user=story.workspace.people["reviewer"], actor=ACTOR, reason="looks right")
    done = release_promote(release=release, actor=ACTOR, reason="shown to be no worse")
    transfers_arrive(story.world)
    story.answer(20, first=300, seed=5)
    return done


def _rolled_back(story: Story, hostile: str) -> Release:
    release = _through(story, users=20, reason=f"slot 3 {hostile}")
    return release_rollback(release=release, actor=ACTOR, reason=f"users complained {hostile}")


def _in_canary(story: Story, hostile: str, *, users: int, shadow: dict[str, Any]) -> Release:
    release = _proposed(story, f"slot 4 {hostile}")
    advance_lanes()
    transfers_arrive(story.world)
    evaluate(release, candidate=0.62, incumbent=0.58)
    advance_lanes()
    advance_lanes()
    release = Release.objects.get(pk=release.pk)
    assert release.state == ReleaseState.CANARY, (release.state, release.outcome)
    _slot(story, release, SlotState.RELEASING, hours=0.5)
    story.answer(users, first=500, like=0.6, seed=3)
    age(release.steps.get(position=0), 1800)
    look()
    return Release.objects.get(pk=release.pk)


def _senders(story: Story, hostile: str) -> None:
    """A source that sends, one that is new, feedback that waits, and a payload that was refused."""
    source, _ = source_create(project=story.world.project, slug=f"web-{uuid.uuid4().hex[:6]}", actor=ACTOR)
    answers = list(Generation.objects.filter(lane=story.world.lane).order_by("-created_at")[:12])
    story.send([(row, True) for row in answers], source)
    sender = Sender(story.world.project, source.slug, ACTOR, source)
    items: list[Any] = [
        thumbs(uuid.uuid4()),
        thumbs(answers[0].id, comment=f"fine {hostile}", event_id=str(uuid.uuid4())),
    ]
    feedback_receive_many(sender=sender, items=[*items, items[1]])
    body = f'{{"signal": "unknown {hostile!r}"}}'.encode("utf-8", "replace")
    [refused] = feedback_receive_many(sender=sender, items=[body])
    assert isinstance(refused, ControlPlaneError)
    payloads_reject(sender=sender, kind=PayloadKind.FEEDBACK, refused=[Refused(body, refused)])
    content = {"signals": {"thumbs": {"values": {"true": 1.0, "false": -1.0}}, "score": {"weight": 2.0}}}
    signal_map_publish(project=story.world.project, content=content, author=None, actor=ACTOR)
