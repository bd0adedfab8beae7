"""What a window may choose from: a lane's generations and the feedback on them that is to be heard."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import msgspec
from django.db.models import Exists, OuterRef

from controlplane.models import BatchItem, Feedback, Generation, Lane
from controlplane.selectors.credit import feedback_credited
from controlplane.services.clock import database_now
from controlplane.services.signals import SignalMapContent, Silence, reward_and_strength, reward_of
from controlplane.states import Consent, GenerationOutcome
from rl_core.specs import BaselineSpec, RealtimeStage, StratumKey
from rl_core.windows.actors import busy_actors, outlying_actors
from rl_core.windows.selection import Candidate, LeftOut

Heard = dict[uuid.UUID, list[Feedback]]


@dataclass(slots=True)
class Read:
    """Candidates newest first, each with its row and the feedback that holds its demonstration (None: none).

    `left_out` counts what is no candidate, by reason. `weigh`: those who answer stand for those who do not.
    """

    generations: int
    elsewhere: int
    weigh: bool
    left_out: Counter[LeftOut] = field(default_factory=Counter)
    rows: list[Generation] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    demonstrations: list[uuid.UUID | None] = field(default_factory=list)


def window_read(*, lane: Lane, stage: RealtimeStage, content: SignalMapContent, until: datetime | None) -> Read:
    """Read the newest generations of the promoted version and what was said of them, as things stood `until` then."""
    now = until or database_now()
    rows = _generations(lane, stage, now)
    valued = content.silence is not Silence.DROP
    read = Read(len(rows), _elsewhere(lane, rows, now), weigh=content.weigh_responses and not valued)
    spoken = msgspec.structs.replace(content, silence=Silence.DROP)  # what was said is one thing, silence another
    quarantined = lane.promoted_version is not None and lane.promoted_version.quarantined_at is not None
    closed = now - timedelta(seconds=content.longest_horizon_s)
    for row in rows:
        reason = LeftOut.VERSION if quarantined else _refused(row, stage, closed)
        if reason is None:
            read.rows.append(row)
        else:
            read.left_out[reason] += 1
    _hear(read, stage, spoken, now)
    if valued:
        read.candidates = [_valued(candidate, content.silence_value) for candidate in read.candidates]
    return read


def _valued(candidate: Candidate, silence: float) -> Candidate:
    return candidate if candidate.answered else replace(candidate, reward=silence)


def _generations(lane: Lane, stage: RealtimeStage, now: datetime) -> list[Generation]:
    taken = BatchItem.objects.filter(generation_id=OuterRef("id"), returned_at__isnull=True)
    rows = Generation.objects.filter(lane=lane, version=lane.promoted_version_id, created_at__lte=now)
    return list(rows.exclude(Exists(taken)).order_by("-created_at")[: stage.window.limit])


def _elsewhere(lane: Lane, rows: Sequence[Generation], now: datetime) -> int:
    if not rows:
        return 0
    others = Generation.objects.filter(lane=lane, created_at__gte=rows[-1].created_at, created_at__lte=now)
    return others.exclude(version=lane.promoted_version_id).count()


def _refused(row: Generation, stage: RealtimeStage, closed: datetime) -> LeftOut | None:
    """Why a generation is no candidate, whatever was said of it."""
    checks = (
        (row.erased_at is not None, LeftOut.ERASED),
        (row.arm not in [arm.value for arm in stage.window.arms], LeftOut.ARM),
        (row.outcome != GenerationOutcome.ANSWERED, LeftOut.UNFINISHED),
        (row.consent != Consent.TRAIN, LeftOut.CONSENT),
        (not row.content_key or not row.sampled_tokens, LeftOut.UNRECORDED),
        (row.created_at > closed, LeftOut.OPEN),
    )
    return next((reason for applies, reason in checks if applies), None)


def _hear(read: Read, stage: RealtimeStage, content: SignalMapContent, now: datetime) -> None:
    """Turn rows into candidates; those of whom only programs, outliers or people without consent spoke go."""
    rows, read.rows = read.rows, []
    said = feedback_credited(generations=rows, until=now)
    allowed = {key: [event for event in events if event.consent == Consent.TRAIN] for key, events in said.items()}
    people = _without(allowed, _programs(rows, allowed, stage), rows)
    usual = _without(people, _outliers(rows, people, stage, content), rows)
    stages = ((said, allowed, LeftOut.CONSENT), (allowed, people, LeftOut.PROGRAM), (people, usual, LeftOut.OUTLIER))
    for row in rows:
        reason = next((why for before, after, why in stages if before[row.id] and not after[row.id]), None)
        if reason is not None:
            read.left_out[reason] += 1
            continue
        events = usual[row.id]
        shown = [event for event in events if event.demonstration.strip()]
        read.rows.append(row)
        read.candidates.append(_candidate(row, events, stage, content, demonstrated=bool(shown)))
        read.demonstrations.append(max(shown, key=lambda event: event.occurred_at).id if shown else None)


def _actor(event: Feedback, row: Generation) -> str:
    """Who gave it: as its sender names people, else the user who was answered."""
    return f"{event.sender}/{event.actor_hash}" if event.actor_hash else row.user_hash


def _without(heard: Heard, actors: set[str], rows: Iterable[Generation]) -> Heard:
    if not actors:
        return heard
    return {row.id: [event for event in heard[row.id] if _actor(event, row) not in actors] for row in rows}


def _programs(rows: Sequence[Generation], heard: Heard, stage: RealtimeStage) -> set[str]:
    events = {event.id: (_actor(event, row), event.occurred_at.timestamp()) for row in rows for event in heard[row.id]}
    return busy_actors(events.values(), an_hour=stage.window.events_an_hour)


def _outliers(rows: Sequence[Generation], heard: Heard, stage: RealtimeStage, content: SignalMapContent) -> set[str]:
    rewards: list[tuple[str, float]] = []
    for row in rows:
        own: dict[str, list[Feedback]] = defaultdict(list)
        for event in heard[row.id]:
            own[_actor(event, row)].append(event)
        for actor, events in own.items():
            reward = reward_of(content, events, generation_at=row.created_at)
            if reward is not None:
                rewards.append((actor, reward))
    window = stage.window
    return outlying_actors(rewards, deviations=window.outlier_deviations, minimum=window.outlier_minimum)


def _candidate(
    row: Generation, events: list[Feedback], stage: RealtimeStage, content: SignalMapContent, *, demonstrated: bool
) -> Candidate:
    found = reward_and_strength(content, events, generation_at=row.created_at)
    actors = {_actor(event, row) for event in events}
    user = row.user_hash or (actors.pop() if len(actors) == 1 else "")
    return Candidate(
        user=user,
        prompt=row.prompt_hash,
        stratum=_stratum(stage.baseline.stratum, row, user, events, stage.baseline),
        weigh_by=_stratum(stage.window.weigh_by, row, user, events, stage.baseline),
        reward=found.value if found else None,
        answered=found is not None or demonstrated,
        whole=row.trainable,
        demonstrated=demonstrated,
        strength=found.strength if found else 1.0,
    )


def _stratum(key: StratumKey, row: Generation, user: str, events: list[Feedback], baseline: BaselineSpec) -> str:
    if key is StratumKey.TAG:
        values = [event.tags[baseline.tag] for event in events if baseline.tag in event.tags]
        return str(values[-1]) if values else ""
    known = {
        StratumKey.NONE: "",
        StratumKey.PROMPT: row.prompt_hash,
        StratumKey.SESSION: row.session,
        StratumKey.SEGMENT: row.segment,
    }
    return known.get(key, user)
