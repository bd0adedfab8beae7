"""Run specs: what a run is to do, frozen, validated, saved resolved as JSON. Imports no torch.

`parse_run_spec` is the only way in: unknown keys, wrong types and values out of range are refused with the path of
the offending key. Defaults are those of the demonstration on a two-core machine.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from rl_core.errors import SpecError
from rl_core.session_specs import SessionsSpec, Spec
from rl_core.types import KvMode, Profile

SPEC_VERSION = 1


class AdvantageKind(StrEnum):
    """How rewards of a group become advantages."""

    DR_GRPO = "dr_grpo"  # reward minus group mean
    GRPO = "grpo"  # the same over the group's standard deviation
    RLOO = "rloo"  # reward minus the mean of the others
    RESPONDERS = "responders"  # single attempts: reward minus the mean of all that answered
    STRATA = "strata"  # single attempts: reward minus a shrunken mean of the others of its stratum, and of its user


class LossKind(StrEnum):
    """Which loss: of tokens, against the policy that sampled them, or of sequences, against a reference policy."""

    PG_TIS = "pg_tis"  # token-level policy gradient, truncated importance sampling
    ICEPOP = "icepop"  # the same, tokens with a ratio out of bounds masked
    PPO_CLIP = "ppo_clip"  # the clipped surrogate between ratio_low and ratio_high; for several steps on one window
    KTO = "kto"  # sequences that were liked or not, one by one
    DPO = "dpo"  # pairs: what should have been said against what was said


PREFERENCE_LOSSES = frozenset({LossKind.KTO, LossKind.DPO})


class KlEstimator(StrEnum):
    """How KL to the reference (the run's first version) enters."""

    NONE = "none"
    K1_REWARD = "k1_reward"  # k1 as a detached penalty in the reward


class OptimizerSpec(Spec, frozen=True, kw_only=True):
    """AdamW on fp32 master weights."""

    learning_rate: float = 3e-5
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        self._require(0 < self.learning_rate < 1, f"learning_rate must be in (0, 1), not {self.learning_rate}")
        self._require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "beta1 and beta2 must be in [0, 1)")
        self._require(self.eps > 0 and self.weight_decay >= 0, "eps must be positive and weight_decay not negative")
        self._require(self.clip_norm > 0, f"clip_norm must be positive, not {self.clip_norm}")


class LossSpec(Spec, frozen=True, kw_only=True):
    """The objective. `scale` multiplies the token loss over `groups · attempts · max tokens` (Dr. GRPO's constant)."""

    kind: LossKind = LossKind.PG_TIS
    advantage: AdvantageKind = AdvantageKind.DR_GRPO
    tis_cap: float = 2.0
    ratio_low: float = 0.5
    ratio_high: float = 5.0
    kl: KlEstimator = KlEstimator.NONE
    kl_coefficient: float = 0.0
    scale: float = 10.0
    router_replay: bool = True
    replay_plausibility: float = 0.0

    def __post_init__(self) -> None:
        self._require(
            self.kind not in PREFERENCE_LOSSES,
            f"loss.kind must be a policy-gradient loss, not {self.kind}; see a real-time stage's preference",
        )
        self._require(self.tis_cap > 0, f"tis_cap must be positive, not {self.tis_cap}")
        self._require(0 <= self.ratio_low < self.ratio_high, "ratio_low must be below ratio_high")
        self._require(
            self.scale > 0 and self.kl_coefficient >= 0, "scale must be positive, kl_coefficient not negative"
        )
        self._require(0 <= self.replay_plausibility <= 1, "replay_plausibility must be in [0, 1]")


class CurriculumKind(StrEnum):
    """Which tasks of the train split a stage draws."""

    UNIFORM = "uniform"  # all in turn, in a seeded order
    VARIANCE = "variance"  # those whose attempts differ in reward; solved and hopeless ones seldom


class CurriculumSpec(Spec, frozen=True, kw_only=True):
    """How tasks are drawn: see `rl_core.curriculum`. All but `kind` concern `variance` alone.

    A task is settled once it has `settled_after` attempts and its shrunken mean reward is at least `solved_from` or at
    most `hopeless_below`. `explore` is the share of draws that goes on over all tasks in turn, settled or not.
    `prior_attempts` is how many imagined attempts at even odds every task begins with.
    """

    kind: CurriculumKind = CurriculumKind.UNIFORM
    settled_after: int = 16
    solved_from: float = 0.9
    hopeless_below: float = 0.1
    explore: float = 0.2
    prior_attempts: float = 2.0

    def __post_init__(self) -> None:
        self._require(self.settled_after >= 1, f"settled_after must be at least 1, not {self.settled_after}")
        self._require(0 <= self.hopeless_below < self.solved_from <= 1, "hopeless_below must be below solved_from")
        self._require(0.01 <= self.explore <= 1, f"explore must be in [0.01, 1], not {self.explore}")
        self._require(self.prior_attempts > 0, f"prior_attempts must be positive, not {self.prior_attempts}")


class RlStage(SessionsSpec, frozen=True, kw_only=True, tag_field="kind", tag="rl"):
    """Simulated RL: `steps` optimiser steps of `prompts_per_step` groups with `group_size` attempts each.

    `max_staleness` is in policy versions: a rollout whose oldest token is more than that behind the step's base
    version is dropped. `eval_every` 0 evaluates the held-out split only before and after. `eval_temperature` 1 asks
    how good the policy is that is trained and sampled from; 0 asks about its most likely answers.
    """

    environment: str = "word-problems"
    task_set: str = "word-problems"
    rubric: str = "word-problems"
    steps: int = 18
    prompts_per_step: int = 4
    group_size: int = 8
    max_staleness: int = 2
    curriculum: CurriculumSpec = CurriculumSpec()
    loss: LossSpec = LossSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    eval_every: int = 0
    eval_tasks: int = 100
    eval_temperature: float = 1.0
    checkpoint_every: int = 5

    @property
    def rolls_out(self) -> bool:
        """Whether the stage needs rollouts of simulated tasks."""
        return True

    def __post_init__(self) -> None:
        self.check_sessions()
        for name in ("steps", "prompts_per_step", "checkpoint_every", "eval_tasks"):
            self._require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        self._require(self.group_size >= 2, f"group_size must be at least 2, not {self.group_size}")
        self._require(self.max_staleness >= 0, f"max_staleness must not be negative, not {self.max_staleness}")
        self._require(self.eval_every >= 0, "eval_every must be 0 (off) or positive")
        self._require(0 <= self.eval_temperature <= 10, "eval_temperature must be in [0, 10]")


class StratumKey(StrEnum):
    """What makes generations of a window alike enough to share a baseline or a response rate."""

    NONE = "none"  # all are one stratum
    PROMPT = "prompt"  # the same prompt, token by token
    SESSION = "session"
    USER = "user"
    SEGMENT = "segment"  # what the product says of its user with the request
    TAG = "tag"  # the value of one tag of their feedback


class WindowArm(StrEnum):
    """Which arm of a lane answered."""

    PROMOTED = "promoted"
    CANARY = "canary"


class WindowSpec(Spec, frozen=True, kw_only=True):
    """Which generations of a lane are trained on. A limit of 0 is off.

    `limit` newest generations are read. `user_cap` is how many of one user's are taken, so that nobody steers the model
    alone; `repeat_cap` how many of one user's to one prompt. Whoever gives more than `events_an_hour` within any hour
    is taken for a program. An actor whose mean reward is more than `outlier_deviations` standard deviations from
    everybody's, on at least `outlier_minimum` answers, is left out. `weight_cap` bounds what an answer of those who
    seldom answer counts; the rates are those of `weigh_by`.
    """

    limit: int = 2000
    arms: tuple[WindowArm, ...] = (WindowArm.PROMOTED,)
    user_cap: int = 20
    repeat_cap: int = 3
    events_an_hour: int = 240
    outlier_deviations: float = 4.0
    outlier_minimum: int = 8
    weigh_by: StratumKey = StratumKey.USER
    weight_cap: float = 4.0

    def __post_init__(self) -> None:
        self._require(2 <= self.limit <= 50_000, f"limit must be in [2, 50000], not {self.limit}")
        self._require(len(self.arms) >= 1, "arms must name at least one arm")
        for name in ("user_cap", "repeat_cap", "events_an_hour", "outlier_deviations"):
            self._require(getattr(self, name) >= 0, f"{name} must be 0 (off) or positive, not {getattr(self, name)}")
        self._require(self.outlier_minimum >= 2, f"outlier_minimum must be at least 2, not {self.outlier_minimum}")
        self._require(self.weigh_by is not StratumKey.TAG, "weigh_by cannot be tag: who is silent sends no tags")
        self._require(self.weight_cap >= 1, f"weight_cap must be at least 1, not {self.weight_cap}")


class BaselineSpec(Spec, frozen=True, kw_only=True):
    """What a reward of a window is compared with under `AdvantageKind.STRATA`: see `rl_core.windows.advantages`."""

    stratum: StratumKey = StratumKey.PROMPT
    tag: str = ""
    user_offset: bool = True

    def __post_init__(self) -> None:
        self._require(
            (self.stratum is StratumKey.TAG) == bool(self.tag), "tag must be named exactly when stratum is tag"
        )


class PreferenceSpec(Spec, frozen=True, kw_only=True):
    """KTO and DPO beside the policy gradient; a weight of 0 leaves one off. The reference is the window's version.

    KTO takes answers that were not sampled from the whole distribution: liked from a reward of `desirable_from` on.
    DPO takes answers to which a person gave a better one: the demonstration is chosen, the answer rejected. A
    demonstration is cut after `max_tokens`.
    """

    kto_weight: float = 1.0
    dpo_weight: float = 1.0
    beta: float = 0.1
    desirable_from: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        for name in ("kto_weight", "dpo_weight", "desirable_weight", "undesirable_weight"):
            self._require(getattr(self, name) >= 0, f"{name} must be 0 (off) or positive, not {getattr(self, name)}")
        self._require(self.beta > 0, f"beta must be positive, not {self.beta}")
        self._require(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        self._require(-1 <= self.desirable_from <= 1, f"desirable_from must be in [-1, 1], not {self.desirable_from}")


class ReplaySpec(SessionsSpec, frozen=True, kw_only=True):
    """Rollouts of simulated tasks by the window's version, mixed into its batch against forgetting.

    `share` of the batch's attempts are replayed, in whole groups; 0 is off. They train on their group's mean.
    """

    share: float = 0.0
    environment: str = "word-problems"
    task_set: str = "word-problems"
    rubric: str = "word-problems"
    group_size: int = 8

    def __post_init__(self) -> None:
        self.check_sessions()
        self._require(0 <= self.share <= 0.9, f"share must be in [0, 0.9], not {self.share}")
        self._require(self.group_size >= 2, f"group_size must be at least 2, not {self.group_size}")

    def groups(self, attempts: int) -> int:
        """How many groups make `share` of a batch that has `attempts` others, rounded up."""
        return math.ceil(self.share * attempts / ((1 - self.share) * self.group_size))


class RealtimeStage(Spec, frozen=True, kw_only=True, tag_field="kind", tag="realtime"):
    """RL on one window of a lane's generations and their feedback: few large steps, moments reset."""

    lane: str
    minimum_answers: int = 40
    optimizer_steps: int = 2
    window: WindowSpec = WindowSpec()
    baseline: BaselineSpec = BaselineSpec()
    preference: PreferenceSpec = PreferenceSpec()
    replay: ReplaySpec = ReplaySpec()
    loss: LossSpec = LossSpec(kind=LossKind.PPO_CLIP, advantage=AdvantageKind.STRATA, ratio_low=0.7, ratio_high=1.5)
    optimizer: OptimizerSpec = OptimizerSpec(learning_rate=1e-4)
    evaluation_task_set: str = "word-problems"
    evaluation_rubric: str = "word-problems"
    evaluation_environment: str = "word-problems"
    eval_tasks: int = 40

    @property
    def rolls_out(self) -> bool:
        """Whether the stage needs rollouts of simulated tasks."""
        return self.replay.share > 0

    def __post_init__(self) -> None:
        self._require(self.minimum_answers >= 2, f"minimum_answers must be at least 2, not {self.minimum_answers}")
        self._require(self.optimizer_steps >= 1, "optimizer_steps must be at least 1")
        self._require(self.eval_tasks >= 1, "eval_tasks must be at least 1")
        self._require(
            self.loss.advantage in (AdvantageKind.RESPONDERS, AdvantageKind.STRATA),
            f"loss.advantage must be responders or strata, not {self.loss.advantage}: a window has single attempts",
        )


Stage = RlStage | RealtimeStage


class RunSpec(Spec, frozen=True, kw_only=True):
    """One training effort. `model` names a model of the project's catalogue; the seed drives everything random.

    `delta_profile` None: the one with which the slowest link's replicas serve a version first, as measured.
    """

    current: ClassVar[int] = SPEC_VERSION

    model: str
    stages: tuple[Stage, ...]
    seed: int = 0
    kv_mode: KvMode = KvMode.KEEP
    delta_profile: Profile | None = None
    rollout_clusters: tuple[str, ...] = ()
    spec_version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        self._require(self.spec_version == SPEC_VERSION, f"spec_version {self.spec_version} is not known to this build")
        self._require(len(self.stages) >= 1, "stages must name at least one stage")
        self._require(bool(self.model), "model must name a model")
        self._require(0 <= self.seed < 2**31, "seed must be in [0, 2^31)")


def parse_run_spec(data: dict[str, Any] | bytes) -> RunSpec:
    """Validate a spec given as a mapping or as JSON bytes. Raises: SpecError, naming the key."""
    try:
        if isinstance(data, bytes):
            return msgspec.json.decode(data, type=RunSpec)
        return msgspec.convert(data, type=RunSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"the run spec is not valid: {error}") from error
    except msgspec.DecodeError as error:
        raise SpecError(f"the run spec is not JSON: {error}") from error


def resolve_run_spec(spec: RunSpec) -> dict[str, Any]:
    """The spec as plain JSON data with every default filled in."""
    resolved: dict[str, Any] = msgspec.to_builtins(spec)
    return resolved


def run_spec_schema() -> dict[str, Any]:
    """The JSON Schema of a run spec, for forms and the API document."""
    return msgspec.json.schema(RunSpec)
