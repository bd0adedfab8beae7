"""From candidates to a batch: repeats and caps, the objective each answer is for, weights and advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rl_core.specs import RealtimeStage
from rl_core.types import Objective
from rl_core.windows.advantages import Attempt, window_advantages
from rl_core.windows.shrinkage import UNKNOWN
from rl_core.windows.weights import answer_weights, effective_size, normalised


class LeftOut(StrEnum):
    """Why a generation of the lane is not trained on."""

    VERSION = "version"  # another version said it, or a version that was set aside
    ARM = "arm"
    UNFINISHED = "unfinished"  # it failed, or the client left
    ERASED = "erased"
    CONSENT = "consent"
    UNRECORDED = "unrecorded"  # its content was not kept
    OPEN = "open"  # its horizon has not closed: feedback may still come
    SILENT = "silent"
    PROGRAM = "program"  # all who answered it send more than people do
    OUTLIER = "outlier"  # all who answered it rate like nobody else
    REPEAT = "repeat"
    USER_CAP = "user_cap"
    UNTRAINABLE = "untrainable"  # not sampled from the whole distribution, and no objective that takes it is on


@dataclass(frozen=True, slots=True)
class Candidate:
    """A generation that may be trained on. `reward` is None when nobody's word counts and silence has no value.

    `whole`: sampled from the whole distribution. `demonstrated`: a person gave a better answer. `strength` is what age
    and distance left of what was said, in (0, 1].
    """

    user: str
    prompt: str
    stratum: str
    weigh_by: str
    reward: float | None
    answered: bool
    whole: bool
    demonstrated: bool = False
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """One answer of the batch, by its index among the candidates.

    `advantage` is what the reward is worth under the policy gradient; under KTO +1 for liked, −1 for disliked; under
    DPO 1. Weights of the policy gradient have mean 1, those of the others are 1.
    """

    index: int
    objective: Objective
    advantage: float
    weight: float


@dataclass(slots=True)
class Selection:
    """What is taken, in the candidates' order, and why the rest (by index) is not."""

    chosen: list[Chosen] = field(default_factory=list)
    left_out: dict[int, LeftOut] = field(default_factory=dict)

    def objectives(self) -> dict[Objective, int]:
        """How many answers each objective has."""
        return dict(Counter(item.objective for item in self.chosen))

    def effective_answers(self) -> float:
        """How many equally weighted answers the policy gradient's are worth."""
        return effective_size([item.weight for item in self.chosen if item.objective is Objective.POLICY_GRADIENT])


def select(candidates: Sequence[Candidate], stage: RealtimeStage, *, weigh: bool) -> Selection:
    """Choose among candidates given newest first: of repeats and beyond a cap the newest are taken.

    An answer counts by its strength and, with `weigh`, by one over the response rate of its `weigh_by`.
    """
    selection = Selection()
    weights = [candidate.strength for candidate in candidates]
    if weigh:
        answered = [candidate.answered for candidate in candidates]
        strata = [candidate.weigh_by for candidate in candidates]
        shares = answer_weights(strata, answered, cap=stage.window.weight_cap)
        weights = [weight * share for weight, share in zip(weights, shares, strict=True)]
    objectives: dict[int, Objective] = {}
    by_user: Counter[str] = Counter()
    by_prompt: Counter[tuple[str, str]] = Counter()
    for index, candidate in enumerate(candidates):
        objective = _objective(candidate, stage)
        reason = objective if isinstance(objective, LeftOut) else _over_cap(candidate, stage, by_user, by_prompt)
        if isinstance(objective, LeftOut) or reason is not None:
            selection.left_out[index] = reason or LeftOut.UNTRAINABLE
            continue
        objectives[index] = objective
        by_user[candidate.user] += 1
        by_prompt[candidate.user, candidate.prompt] += 1
    gradient = [index for index, objective in objectives.items() if objective is Objective.POLICY_GRADIENT]
    worth = _worth(candidates, gradient, weights, stage)
    for index, objective in objectives.items():
        advantage, weight = worth.get(index) or (_label(candidates[index], objective, stage), 1.0)
        selection.chosen.append(Chosen(index, objective, advantage, weight))
    return selection


def _objective(candidate: Candidate, stage: RealtimeStage) -> Objective | LeftOut:
    """A better answer says more than a reward; greedy and truncated samples never enter the policy gradient."""
    if candidate.demonstrated and stage.preference.dpo_weight:
        return Objective.DPO
    if candidate.reward is None:
        return LeftOut.SILENT
    if candidate.whole:
        return Objective.POLICY_GRADIENT
    return Objective.KTO if stage.preference.kto_weight else LeftOut.UNTRAINABLE


def _over_cap(
    candidate: Candidate, stage: RealtimeStage, by_user: Counter[str], by_prompt: Counter[tuple[str, str]]
) -> LeftOut | None:
    """Nobody knows how many people stand behind an unknown user: no cap holds there."""
    if candidate.user == UNKNOWN:
        return None
    window, asked = stage.window, (candidate.user, candidate.prompt)
    if window.repeat_cap and candidate.prompt and by_prompt[asked] >= window.repeat_cap:
        return LeftOut.REPEAT
    if window.user_cap and by_user[candidate.user] >= window.user_cap:
        return LeftOut.USER_CAP
    return None


def _worth(
    candidates: Sequence[Candidate], gradient: Sequence[int], weights: Sequence[float], stage: RealtimeStage
) -> dict[int, tuple[float, float]]:
    """Advantage and weight of what the policy gradient takes."""
    attempts = [
        Attempt(candidates[index].reward or 0.0, weight, candidates[index].stratum, candidates[index].user)
        for index, weight in zip(gradient, normalised([weights[index] for index in gradient]), strict=True)
    ]
    advantages = window_advantages(stage.loss.advantage, attempts, user_offset=stage.baseline.user_offset)
    rows = zip(gradient, advantages, attempts, strict=True)
    return {index: (advantage, attempt.weight) for index, advantage, attempt in rows}


def _label(candidate: Candidate, objective: Objective, stage: RealtimeStage) -> float:
    if objective is Objective.DPO or candidate.reward is None:
        return 1.0
    return 1.0 if candidate.reward >= stage.preference.desirable_from else -1.0
