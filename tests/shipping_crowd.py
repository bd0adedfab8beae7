"""Rows of a lane's many users at once, for tests of what is made of them; who is routed where is real."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.models import Feedback, Generation, SignalDefinition
from controlplane.selectors.lane_routes import lane_route
from controlplane.services.clock import database_now
from controlplane.services.generations import user_hash
from controlplane.states import Consent, FeedbackState, GenerationOutcome
from rl_core.types import FinishReason
from tests.lane_rows import LaneWorld


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request of a user, how it ended, and what the user said of the answer (None: nothing)."""

    user: str
    likes: bool | None = None
    outcome: GenerationOutcome = GenerationOutcome.ANSWERED
    segment: str = ""


def crowd(world: LaneWorld, asked: Iterable[Asked]) -> None:
    """Write them down as `tests.shipping_rig.Users` and the receiver of feedback would have, in two inserts."""
    route = lane_route(project_id=world.project.pk, slug=world.lane.slug)
    assert route is not None
    thumbs = SignalDefinition.objects.get(project=world.project, slug="thumbs")
    now = database_now()
    generations, said = [], []
    for number, one in enumerate(asked):
        side, assignment = route.assign(one.user)
        answered = one.outcome == GenerationOutcome.ANSWERED
        generation = Generation(
            created_at=now,
            lane=route.lane,
            arm=assignment.arm,
            release_id=assignment.release_id,
            canary_step=assignment.canary_step,
            outcome=one.outcome,
            version=side.version,
            user_hash=user_hash(lane=route.lane, user_key=one.user),
            segment=one.segment,
            prompt_tokens=2,
            sampled_tokens=3 if answered else 0,
            finish_reason=FinishReason.STOP,
            latency_ms=20.0,
        )
        generations.append(generation)
        if one.likes is not None:
            said.append(
                Feedback(
                    created_at=now,
                    project=world.project,
                    sender=f"app {number}",
                    signal=thumbs,
                    state=FeedbackState.JOINED,
                    target_kind="generation",
                    target_id=str(generation.id),
                    generation_id=generation.id,
                    value=one.likes,
                    occurred_at=now,
                    consent=Consent.TRAIN,
                )
            )
    Generation.objects.bulk_create(generations)
    Feedback.objects.bulk_create(said)
