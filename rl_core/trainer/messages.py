"""What the trainer process is asked and answers, as records. Imports no torch.

One JSON object a line. A request is `{"op": …, …}`; `{"progress": {…}}` lines may precede its answer; an answer is
`{"result": {…}}` or `{"error": {"code", "message", "retryable"}}`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rl_core.types import Objective, Profile


class Op(StrEnum):
    """What the trainer process can be asked."""

    OPEN = "open"  # load a model or a checkpoint and stand at a position
    STEP = "step"  # take one optimiser step, and publish the new version
    CHECKPOINT = "checkpoint"  # write everything that a bit-exact resume needs
    EXPORT = "export"  # write a Hugging Face folder of the current weights
    POSITION = "position"  # where it stands
    CLOSE = "close"  # end


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer stands: `step` optimiser steps taken in `epoch` of `run`; `fence` of the last request that
    carried one.
    """

    run: str
    epoch: int
    step: int
    fence: int


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One step in numbers. Means are over trained tokens unless they say otherwise; nats; None: not measured.

    `k1_behaviour`, `k3_behaviour` estimate KL(behaviour ‖ trained policy), see `mismatch`; `k3_rollouts` is the latter
    by rollout. `kl_reference_k1` is k1 between the trained policy and the run's first version. Shares are in [0, 1].
    What the policy gradient trains is meant throughout, but for the `preference_` numbers: those are of KTO and DPO,
    the margin being by how much the log-ratio of what was liked or chosen is above that of what was not.
    """

    step: int
    reward_mean: float
    reward_std: float
    advantage_abs_mean: float
    loss: float
    grad_norm: float
    clipped: bool
    entropy: float | None
    k1_behaviour: float | None
    k3_behaviour: float | None
    k3_rollouts: dict[str, float]
    max_ratio: float | None
    ess: float | None
    share_masked: float | None
    share_capped: float | None
    kl_reference_k1: float | None
    routing_disagreement: float | None
    share_routes_dropped: float | None
    groups: int
    rollouts: int
    share_groups_without_variance: float
    trained_tokens: int
    untrainable_tokens: int
    computed_tokens: int
    sequence_tokens: int
    optimizer_steps: int
    preference_rollouts: int
    preference_tokens: int
    preference_loss: float | None
    preference_margin: float | None
    seconds: float
    cpu_seconds: float


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests: `{"op": ..., **fields}`."""


class BaseRef(_Request, frozen=True, kw_only=True):
    """The version that a delta is made from; `manifest` None where none was published."""

    version: str
    root: str
    manifest: str | None = None


class RolloutRef(_Request, frozen=True, kw_only=True):
    """A scored rollout: `blob` is the object key of its trajectory.

    `advantage` None leaves it to the stage's `loss.advantage`; under KTO it is +1 for liked, −1 for disliked. `weight`
    is how much the rollout counts. `demonstration` is what should have been said, for DPO.
    """

    id: str
    group: str
    reward: float
    blob: str
    advantage: float | None = None
    weight: float = 1.0
    objective: Objective = Objective.POLICY_GRADIENT
    demonstration: str = ""


class OpenRequest(_Request, frozen=True, kw_only=True, tag_field="op", tag=Op.OPEN.value):
    """Load `model_dir` (the run's first version), then `checkpoint` over it when there is one."""

    run: str
    model_dir: str
    store_url: str
    checkpoint_root: str
    stage: dict[str, object]
    seed: int
    lineage: str
    epoch: int = 0
    fence: int = 0
    checkpoint: str | None = None
    threads: int | None = None


class StepRequest(_Request, frozen=True, kw_only=True, tag_field="op", tag=Op.STEP.value):
    """Take step `step` (one more than the position's) and publish it as `version`, encoded in `profile`."""

    step: int
    fence: int
    version: str
    base: BaseRef
    rollouts: list[RolloutRef]
    publish: bool = True
    profile: Profile = Profile.SMALL


class CheckpointRequest(_Request, frozen=True, kw_only=True, tag_field="op", tag=Op.CHECKPOINT.value):
    """Write a checkpoint under the opened `checkpoint_root`."""

    fence: int


class ExportRequest(_Request, frozen=True, kw_only=True, tag_field="op", tag=Op.EXPORT.value):
    """Write a new Hugging Face folder."""

    folder: str


class PositionRequest(_Request, frozen=True, kw_only=True, tag_field="op", tag=Op.POSITION.value):
    """Ask for the position alone."""


class CloseRequest(_Request, frozen=True, kw_only=True, tag_field="op", tag=Op.CLOSE.value):
    """End the process."""


Request = OpenRequest | StepRequest | CheckpointRequest | ExportRequest | PositionRequest | CloseRequest
