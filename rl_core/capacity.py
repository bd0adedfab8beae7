"""What rollout capacity keeps a trainer busy, what one more replica buys, and what a task costs. Arithmetic alone.

Rollouts and training overlap: a step takes as long as the slower of the two. A token that is sampled in vain (its
group was dropped or voided, or it was for an evaluation) costs as much as one that is trained on, so that demand is
divided by the share that reaches a step. Units: seconds, tokens, dollars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from rl_core.errors import SpecError

# A forward pass takes 2 FLOPs for each weight and token, forward and backward together 6: what sampling a token costs
# of what training on it does, at equal utilisation. Source: Kaplan et al. 2020, "Scaling Laws", section 2.1.
THEORETICAL_SHARE: Final = 2 / 6


class Limit(StrEnum):
    """Which side the other one waits for."""

    TRAINER = "trainer"  # rollouts are ready before it is
    ROLLOUTS = "rollouts"  # the trainer waits for them


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster as it was over the measured time. `devices` are those of one replica.

    `tokens_s` are all its replicas' sampled tokens a second, in the time that they were idle too.
    """

    name: str
    replicas: int
    tokens_s: float
    idle_share: float
    device: str = ""
    devices: int = 1
    dollars_device_hour: float | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.devices < 1:
            raise SpecError(f"cluster {self.name} has {self.replicas} replicas of {self.devices} devices: none is none")
        if not 0 <= self.idle_share <= 1 or self.tokens_s < 0:
            raise SpecError(f"cluster {self.name} cannot be idle for {self.idle_share} at {self.tokens_s} tokens/s")

    @property
    def capacity_tokens_s(self) -> float:
        """Tokens a second if it were never idle; what was measured where it never worked."""
        return self.tokens_s / (1 - self.idle_share) if self.idle_share < 1 else self.tokens_s

    @property
    def replica_tokens_s(self) -> float:
        """Those of one replica."""
        return self.capacity_tokens_s / self.replicas

    @property
    def all_devices(self) -> int:
        """Devices of all replicas."""
        return self.replicas * self.devices

    @property
    def dollars_hour(self) -> float | None:
        """What the cluster costs, idle or not."""
        return None if self.dollars_device_hour is None else self.dollars_device_hour * self.all_devices

    @property
    def dollars_million_tokens(self) -> float | None:
        """What a million sampled tokens cost when it is never idle; None without a price or a token."""
        if self.dollars_hour is None or not self.capacity_tokens_s:
            return None
        return 1e6 * self.dollars_hour / 3600 / self.capacity_tokens_s


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of a run takes: `step_tokens` sampled tokens of `step_tasks` tasks, `train_s` of the trainer.

    `useful_share` of all tokens that the run samples reach a step.
    """

    step_tokens: float
    step_tasks: float
    train_s: float
    useful_share: float = 1.0
    trainer_devices: int = 1
    trainer_dollars_device_hour: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.useful_share <= 1 and self.step_tokens > 0 and self.step_tasks > 0 and self.train_s > 0):
            raise SpecError("a step takes tokens, tasks and time, and some of what is sampled reaches it")

    @property
    def needed_tokens_s(self) -> float:
        """Sampled tokens a second that keep the trainer busy."""
        return self.step_tokens / self.useful_share / self.train_s

    def step_s(self, capacity_tokens_s: float) -> float:
        """How long a step takes when rollouts are so fast; infinite without any."""
        if capacity_tokens_s <= 0:
            return math.inf
        return max(self.train_s, self.step_tokens / self.useful_share / capacity_tokens_s)


class Further(msgspec.Struct, frozen=True, kw_only=True):
    """What one more replica of a cluster buys. `replicas_to_balance` more of them would keep the trainer busy."""

    cluster: str
    device: str
    tokens_s: float
    step_s: float
    steps_hour_more: float
    trainer_idle_share: float
    dollars_hour: float | None
    replicas_to_balance: int


class TaskCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one task of a step costs, all its attempts together; dollars pay for idle time, too.

    `sampled_tokens` count what was sampled in vain; `rollout_device_s` is busy time alone. `dollars` are those of
    `cluster_dollars`, in the order of the clusters, and of the trainer.
    """

    sampled_tokens: float
    rollout_device_s: float
    trainer_device_s: float
    dollars: float | None
    cluster_dollars: tuple[float | None, ...]
    trainer_dollars: float | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands, and what would change it. Idle shares are those that follow from the rates."""

    limit: Limit
    needed_tokens_s: float
    capacity_tokens_s: float
    step_s: float
    trainer_idle_share: float
    rollouts_idle_share: float
    rollout_device_s_each: float
    theoretical_device_s_each: float
    further: tuple[Further, ...]
    task: TaskCost

    @property
    def missing_tokens_s(self) -> float:
        """What the trainer lacks; 0 when it is busy."""
        return max(0.0, self.needed_tokens_s - self.capacity_tokens_s)


def plan(demand: Demand, clusters: Sequence[Measured]) -> Plan:
    """What the measured rates come to.

    `rollout_device_s_each` is by how many busy device-seconds of rollouts each device-second of the trainer is fed;
    `theoretical_device_s_each` is what that would be at equal utilisation, with what is sampled in vain.

    Raises: SpecError without a cluster that samples anything.
    """
    capacity = sum(cluster.capacity_tokens_s for cluster in clusters)
    if capacity <= 0:
        raise SpecError("no cluster sampled a token in the measured time")
    step_s = demand.step_s(capacity)
    needed = demand.needed_tokens_s
    busy_share = min(1.0, needed / capacity)
    trainer_device_s = demand.trainer_devices * demand.train_s
    rollout_device_s = busy_share * step_s * sum(cluster.all_devices for cluster in clusters)
    return Plan(
        limit=Limit.ROLLOUTS if needed > capacity else Limit.TRAINER,
        needed_tokens_s=needed,
        capacity_tokens_s=capacity,
        step_s=step_s,
        trainer_idle_share=1 - demand.train_s / step_s,
        rollouts_idle_share=1 - busy_share,
        rollout_device_s_each=rollout_device_s / trainer_device_s,
        theoretical_device_s_each=THEORETICAL_SHARE / demand.useful_share,
        further=tuple(_further(demand, cluster, capacity) for cluster in clusters if cluster.replica_tokens_s > 0),
        task=_task_cost(demand, clusters, step_s=step_s, rollout_device_s=rollout_device_s),
    )


def _further(demand: Demand, cluster: Measured, capacity: float) -> Further:
    before_s, after_s = demand.step_s(capacity), demand.step_s(capacity + cluster.replica_tokens_s)
    missing = max(0.0, demand.needed_tokens_s - capacity)
    return Further(
        cluster=cluster.name,
        device=cluster.device,
        tokens_s=cluster.replica_tokens_s,
        step_s=after_s,
        steps_hour_more=3600 / after_s - 3600 / before_s,
        trainer_idle_share=1 - demand.train_s / after_s,
        dollars_hour=None if cluster.dollars_hour is None else cluster.dollars_hour / cluster.replicas,
        replicas_to_balance=math.ceil(missing / cluster.replica_tokens_s - 1e-9),
    )


def _task_cost(demand: Demand, clusters: Sequence[Measured], *, step_s: float, rollout_device_s: float) -> TaskCost:
    price = demand.trainer_dollars_device_hour
    trainer_hour = None if price is None else price * demand.trainer_devices
    *paid, trainer_paid = (
        None if hourly is None else hourly * step_s / 3600 / demand.step_tasks
        for hourly in (*(cluster.dollars_hour for cluster in clusters), trainer_hour)
    )
    known = [dollars for dollars in (*paid, trainer_paid) if dollars is not None]
    return TaskCost(
        sampled_tokens=demand.step_tokens / demand.useful_share / demand.step_tasks,
        rollout_device_s=rollout_device_s / demand.step_tasks,
        trainer_device_s=demand.trainer_devices * demand.train_s / demand.step_tasks,
        dollars=sum(known) if len(known) == len(paid) + 1 else None,
        cluster_dollars=tuple(paid),
        trainer_dollars=trainer_paid,
    )
