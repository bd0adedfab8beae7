"""What the demonstration prints: a line for each step, and the summary."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.models import Evaluation, RolloutGroup, Run, Step
from controlplane.selectors.run_summary import ClusterShipping, Gain, RunSummary
from controlplane.services.metrics import Metric
from controlplane.states import EvaluationState, GroupPurpose, GroupState, StepState

_BAR = 24


def step_line(step: Step, *, total: int, elapsed_s: float) -> str:
    """One published step."""
    metrics = step.metrics
    reward = metrics.get(Metric.REWARD_MEAN, 0.0)
    bar = "█" * round(_BAR * min(1.0, max(0.0, reward)))
    parts = [f"step {step.number:>3}/{total}", f"reward {reward:.2f} {bar:<{_BAR}}"]
    if Metric.STALENESS_MEAN in metrics:
        parts.append(f"stale {metrics[Metric.STALENESS_MEAN]:.1f}")
    version = step.version
    if version is not None and version.delta_bytes and version.full_bytes:
        parts.append(f"delta {megabytes(version.delta_bytes)} of {megabytes(version.full_bytes)}")
    parts.append(clock(elapsed_s))
    return "  ".join(parts)


def progress_line(run: Run, *, total: int) -> str:
    """What is under way between two steps."""
    evaluation = Evaluation.objects.filter(run=run, state=EvaluationState.RUNNING).first()
    published = run.steps.filter(state=StepState.PUBLISHED).count()
    if evaluation is not None:
        scored = evaluation.groups.filter(mean_reward__isnull=False).count()
        return f"held-out tasks {scored}/{evaluation.task_count}"
    if published >= total:
        return "finishing"
    if run.steps.filter(state=StepState.BATCHED).exists():
        return f"step {published + 1}/{total}: training"
    groups = RolloutGroup.objects.filter(run=run, purpose=GroupPurpose.TRAIN)
    ready = groups.filter(state=GroupState.READY).count()
    running = groups.filter(state__in=[GroupState.ADMITTED, GroupState.RUNNING, GroupState.SCORING]).count()
    return f"step {published + 1}/{total}: {ready} groups ready, {running} under way"


def summary_lines(summary: RunSummary, *, elapsed_s: float) -> Iterator[str]:
    """The summary, a line at a time."""
    yield f"{summary.steps} steps in {clock(elapsed_s)}"
    window = f"first {summary.window} → last {summary.window} steps"
    yield gain_line("reward", window, summary.reward)
    yield gain_line("held-out", "before → after", summary.heldout)
    for cluster in summary.clusters:
        yield shipping_line(cluster)
    if summary.clusters:
        same = all(cluster.at_head for cluster in summary.clusters)
        yield "weights    " + (
            "every replica's root equals the trainer's" if same else "NOT every replica's root equals the trainer's"
        )
    if summary.gained:
        yield "verdict    it learned: both intervals lie above zero"
    else:
        yield "verdict    no gain shown: not both intervals lie above zero"


def gain_line(name: str, what: str, gain: Gain | None) -> str:
    """One comparison with its interval."""
    if gain is None:
        return f"{name:<10} {what}: too little data"
    interval = gain.difference
    return (
        f"{name:<10} {what}: {gain.before:.2f} → {gain.after:.2f}, "
        f"difference {interval.mean:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}] (95 %)"
    )


def shipping_line(cluster: ClusterShipping) -> str:
    """What one cluster received."""
    return (
        f"{cluster.slug:<13} {cluster.versions} versions, {megabytes(cluster.fetched_bytes)} instead of "
        f"{megabytes(cluster.full_bytes)} ({cluster.ratio:.0f} times less), pauses "
        f"{cluster.pause_median_s * 1000:.0f} ms median, {cluster.pause_max_s * 1000:.0f} ms longest"
    )


def megabytes(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
