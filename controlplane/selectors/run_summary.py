"""What a finished run came to: rewards and held-out gain with intervals, versions shipped, bytes, pauses, roots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from django.db.models import QuerySet

from controlplane.models import Evaluation, Replica, ReplicaSlot, RolloutGroup, Run, Transfer
from controlplane.selectors.answering import there
from controlplane.selectors.statistics import Interval, difference_interval, paired_interval
from controlplane.states import EvaluationState, GroupState, StepState, TransferState, WeightSlot
from rl_core.types import ClusterRole

WINDOW_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A mean before and after, and the interval of the difference."""

    before: float
    after: float
    difference: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShipping:
    """What reached one cluster. `pauses_s` are the swaps' pauses, one for each transfer."""

    slug: str
    region: str
    versions: int
    fetched_bytes: int
    full_bytes: int
    pauses_s: tuple[float, ...]
    at_head: bool  # every replica holds the root of the run's head

    @property
    def ratio(self) -> float:
        """How many times less was moved than whole weights would have been; 0 when nothing was."""
        return self.full_bytes / self.fetched_bytes if self.fetched_bytes else 0.0

    @property
    def pause_median_s(self) -> float:
        """The middle pause; 0 without a transfer."""
        return median(self.pauses_s) if self.pauses_s else 0.0

    @property
    def pause_max_s(self) -> float:
        """The longest pause; 0 without a transfer."""
        return max(self.pauses_s, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The whole. `window` is how many first and last steps the reward compares; gains are None without data."""

    steps: int
    window: int
    reward: Gain | None
    heldout: Gain | None
    clusters: tuple[ClusterShipping, ...]

    @property
    def gained(self) -> bool:
        """Whether both intervals lie above zero."""
        return all(gain is not None and gain.difference.above_zero for gain in (self.reward, self.heldout))


def run_summary(run: Run) -> RunSummary:
    """Summarise a run from its rows."""
    steps = run.steps.filter(state=StepState.PUBLISHED).count()
    window = min(WINDOW_STEPS, steps // 2)
    return RunSummary(
        steps=steps,
        window=window,
        reward=_reward_gain(run, steps=steps, window=window),
        heldout=_heldout_gain(run),
        clusters=tuple(_shipping(run)),
    )


def _reward_gain(run: Run, *, steps: int, window: int) -> Gain | None:
    groups = RolloutGroup.objects.filter(run=run, state=GroupState.CONSUMED, step__state=StepState.PUBLISHED)
    first = _rewards(groups.filter(step__number__lte=window))
    last = _rewards(groups.filter(step__number__gt=steps - window))
    if not first or not last:
        return None
    return Gain(before=_mean(first), after=_mean(last), difference=difference_interval(first, last))


def _rewards(groups: QuerySet[RolloutGroup]) -> list[float]:
    return [reward for reward in groups.values_list("mean_reward", flat=True) if reward is not None]


def _heldout_gain(run: Run) -> Gain | None:
    done = Evaluation.objects.filter(run=run, state=EvaluationState.DONE, step_number__isnull=False)
    before, after = done.order_by("step_number").first(), done.order_by("-step_number").first()
    if before is None or after is None or before.pk == after.pk:
        return None
    old, new = _by_task(before), _by_task(after)
    tasks = sorted(old.keys() & new.keys())
    if not tasks:
        return None
    return Gain(
        before=_mean([old[task] for task in tasks]),
        after=_mean([new[task] for task in tasks]),
        difference=paired_interval([new[task] - old[task] for task in tasks]),
    )


def _by_task(evaluation: Evaluation) -> dict[str, float]:
    rows = evaluation.groups.values_list("task__key", "mean_reward")
    return {key: reward for key, reward in rows if reward is not None}


def _shipping(run: Run) -> list[ClusterShipping]:
    done = Transfer.objects.filter(version__lineage_id=run.lineage_id, state=TransferState.DONE).select_related(
        "version"
    )
    slugs: dict[str, list[Transfer]] = {}
    for transfer in done.select_related("replica__cluster").order_by("created_at"):
        if transfer.replica.cluster.role == ClusterRole.ROLLOUT:
            slugs.setdefault(transfer.replica.cluster.slug, []).append(transfer)
    return [_of_cluster(run, transfers) for _, transfers in sorted(slugs.items())]


def _of_cluster(run: Run, transfers: Sequence[Transfer]) -> ClusterShipping:
    cluster = transfers[0].replica.cluster
    run.lineage.refresh_from_db()
    head = run.lineage.head
    roots = ReplicaSlot.objects.filter(there("replica__"), replica__cluster=cluster, slot=WeightSlot.DEFAULT.value)
    replicas = Replica.objects.filter(there(), cluster=cluster).count()
    return ClusterShipping(
        slug=cluster.slug,
        region=cluster.region,
        versions=len({transfer.version_id for transfer in transfers if transfer.version.number > 0}),
        fetched_bytes=sum(transfer.fetched_bytes or 0 for transfer in transfers),
        full_bytes=sum(transfer.full_bytes or transfer.version.full_bytes or 0 for transfer in transfers),
        pauses_s=tuple(transfer.timings["pause_s"] for transfer in transfers if "pause_s" in transfer.timings),
        at_head=head is not None and replicas > 0 and roots.filter(current_root=head.root).count() == replicas,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
