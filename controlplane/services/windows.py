"""The window of a real-time stage: which generations and which feedback become its one batch."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from controlplane.errors import NotFound
from controlplane.models import Generation, Lane, Project, Run, SignalMap, User
from controlplane.services.events import Actor
from controlplane.services.runs import run_create
from controlplane.services.signals import SignalMapContent
from controlplane.services.window_candidates import Read, window_read
from rl_core.specs import RealtimeStage, StratumKey
from rl_core.types import Objective, StageKind
from rl_core.windows.selection import Chosen, LeftOut, Selection, select


@dataclass(frozen=True, slots=True)
class WindowItem:
    """One generation with the reward that its users' feedback gives it, what that is worth, and how much it counts.

    `feedback_id` names the feedback whose demonstration is preferred to it, for DPO.
    """

    generation: Generation
    reward: float
    objective: Objective = Objective.POLICY_GRADIENT
    advantage: float = 0.0
    weight: float = 1.0
    feedback_id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a stage would train on now, oldest first, and why the rest is left out.

    `answers` of the items have feedback that counts; the others are silence that has a value. `generations` are those
    of the promoted version that no step holds; `elsewhere` what other versions of the lane said in the same time.
    Of the `eligible` ones, taken or not, `answered` have feedback that counts. `signal_map` names the map that gave
    the rewards, by number and hash.
    """

    items: list[WindowItem]
    answers: int
    left_out: Mapping[LeftOut, int]
    generations: int
    elsewhere: int
    eligible: int
    answered: int
    effective_answers: float
    strata: int
    objectives: Mapping[Objective, int] = field(default_factory=dict)
    signal_map: Mapping[str, Any] = field(default_factory=dict)

    @property
    def silent(self) -> int:
        """Generations that nobody said anything of that counts."""
        return self.left_out.get(LeftOut.SILENT, 0)

    @property
    def untrainable(self) -> int:
        """Generations not sampled from the whole distribution, left out or routed past the policy gradient."""
        return self.left_out.get(LeftOut.UNTRAINABLE, 0) + self.objectives.get(Objective.KTO, 0)

    @property
    def without_consent(self) -> int:
        """Generations that nobody allowed to train on, or whose content was not kept."""
        return self.left_out.get(LeftOut.CONSENT, 0) + self.left_out.get(LeftOut.UNRECORDED, 0)

    @property
    def response_rate(self) -> float | None:
        """The share of eligible generations that were answered; None without any."""
        return self.answered / self.eligible if self.eligible else None

    @property
    def on_policy_share(self) -> float | None:
        """The share of what the lane said, in the window's time, that exactly the promoted version said."""
        said = self.generations + self.elsewhere
        return self.generations / said if said else None

    def report(self) -> dict[str, Any]:
        """The window in numbers, as its step keeps them."""
        return {
            "items": len(self.items),
            "generations": self.generations,
            "eligible": self.eligible,
            "answered": self.answered,
            "response_rate": self.response_rate,
            "on_policy_share": self.on_policy_share,
            "effective_answers": self.effective_answers,
            "strata": self.strata,
            "objectives": {str(key): count for key, count in self.objectives.items()},
            "left_out": {str(key): count for key, count in self.left_out.items()},
            "signal_map": dict(self.signal_map),
        }


def lane_named(*, project: Project, slug: str) -> Lane:
    """The project's lane. Raises: NotFound."""
    lane = Lane.objects.select_related("promoted_version", "cluster", "project", "model").filter(
        project=project, slug=slug
    )
    found = lane.first()
    if found is None:
        raise NotFound(f"no lane {slug!r} in this project", field="lane")
    return found


def lane_stage(lane: Lane) -> RealtimeStage:
    """The real-time stage that the lane's cadence describes; the defaults where it describes none that fits."""
    try:
        return msgspec.convert(_stage_data(lane), type=RealtimeStage)
    except msgspec.ValidationError:
        return RealtimeStage(lane=lane.slug)


def window_collect(*, lane: Lane, stage: RealtimeStage | None = None, until: datetime | None = None) -> Window:
    """What the stage (default: the lane's) would train on, as things stood `until` then (default: now).

    Generations of exactly the promoted version whose horizon has closed, that no step holds; each is taken, or
    left out for one reason. Raises: NotFound when the project has no signal map.
    """
    stage = stage or lane_stage(lane)
    row = _newest_map(lane.project)
    content = msgspec.convert(row.content, type=SignalMapContent)
    read = window_read(lane=lane, stage=stage, content=content, until=until)
    selection = select(read.candidates, stage, weigh=read.weigh)
    left_out = Counter(read.left_out)
    left_out.update(selection.left_out.values())
    return Window(
        items=[_item(read, chosen) for chosen in reversed(selection.chosen)],
        answers=sum(read.candidates[chosen.index].answered for chosen in selection.chosen),
        left_out=left_out,
        generations=read.generations,
        elsewhere=read.elsewhere,
        eligible=len(read.candidates),
        answered=sum(candidate.answered for candidate in read.candidates),
        effective_answers=selection.effective_answers(),
        strata=_strata(read, selection, stage),
        objectives=selection.objectives(),
        signal_map={"number": row.number, "hash": row.content_hash},
    )


def _item(read: Read, chosen: Chosen) -> WindowItem:
    candidate = read.candidates[chosen.index]
    paired = chosen.objective is Objective.DPO
    return WindowItem(
        generation=read.rows[chosen.index],
        reward=candidate.reward or 0.0,
        objective=chosen.objective,
        advantage=chosen.advantage,
        weight=chosen.weight,
        feedback_id=read.demonstrations[chosen.index] if paired else None,
    )


def _strata(read: Read, selection: Selection, stage: RealtimeStage) -> int:
    """How many strata the policy gradient's answers are compared within."""
    chosen = [item.index for item in selection.chosen if item.objective is Objective.POLICY_GRADIENT]
    if stage.baseline.stratum is StratumKey.NONE:
        return min(1, len(chosen))
    return len({read.candidates[index].stratum for index in chosen})


def lane_train(
    *, lane: Lane, name: str, actor: Actor, user: User | None, overrides: dict[str, Any] | None = None
) -> Run:
    """Create the run that trains the lane's promoted version on its present window.

    `overrides` replace fields of the real-time stage that the lane's cadence describes. Raises: Invalid.
    """
    return run_create(
        project=lane.project,
        name=name,
        spec={"model": lane.model.slug, "stages": [{**_stage_data(lane), **(overrides or {})}]},
        actor=actor,
        user=user,
        parent_version=lane.promoted_version,
    )


def _stage_data(lane: Lane) -> dict[str, Any]:
    return {**lane.cadence.get("stage", {}), "kind": StageKind.REALTIME.value, "lane": lane.slug}


def signal_map_current(*, project: Project) -> SignalMapContent:
    """The newest published map. Raises: NotFound when there is none."""
    return msgspec.convert(_newest_map(project).content, type=SignalMapContent)


def _newest_map(project: Project) -> SignalMap:
    row = SignalMap.objects.filter(project=project).order_by("-number").first()
    if row is None:
        raise NotFound("this project has no signal map yet; publish one on the feedback page")
    return row
