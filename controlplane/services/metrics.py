"""Series of a run. Over steps: one value for each step, written once. Over time: one more point each time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

from django.db import transaction
from django.db.models.functions import Now

from controlplane.models import MetricPoint, Run
from controlplane.services.events import SYSTEM, Actor, event_append, run_topic
from controlplane.states import EventType


class Metric(StrEnum):
    """Series that the control plane itself records; the trainer's metrics are recorded beside them by their names."""

    # over steps
    REWARD_MEAN = "reward_mean"
    HELDOUT_REWARD = "heldout_reward"
    STALENESS_MEAN = "staleness_mean"
    STALENESS_MAX = "staleness_max"
    DELTA_BYTES = "delta_bytes"
    DELTA_RATIO = "delta_ratio"  # full bytes over delta bytes
    CHANGED_SHARE = "changed_share"  # of all elements
    SAMPLED_TOKENS = "sampled_tokens"
    STEP_S = "step_s"  # seconds of the trainer in the step, publishing included
    # of a real-time stage's window, at its step
    WINDOW_ANSWERS = "window_answers"
    WINDOW_EFFECTIVE_ANSWERS = "window_effective_answers"  # Kish's effective size of the weights
    WINDOW_RESPONSE_RATE = "window_response_rate"
    WINDOW_ON_POLICY = "window_on_policy_share"  # of what the lane said in the window's time
    WINDOW_STRATA = "window_strata"
    WINDOW_REPLAYED = "window_replayed"  # rollouts of simulated tasks mixed in
    # over time
    TOKENS_PER_S = "tokens_per_s"
    ENGINE_IDLE = "engine_idle_share"
    TRAINER_IDLE = "trainer_idle_share"


CLUSTER_VERSION = "version/"  # followed by the cluster's slug: the version number it serves, over time
WINDOW_LEFT_OUT = "window_left_out/"  # followed by the reason: how many generations
ENGINE_IDLE_OF = "engine_idle_share/"  # followed by the cluster's slug
MISMATCH_OF = "k3_behaviour/"  # followed by the cluster's slug: of what it sampled, at the step that trained on it


def metrics_record(
    *, run: Run, values: Mapping[str, float], step: int | None = None, actor: Actor = SYSTEM, announce: bool = True
) -> None:
    """Add one point to each named series. For a step, a point that is there already stays as it is.

    Values that are not finite are left out: a chart cannot show them, and a mean must not meet them.
    """
    points = {str(name): float(value) for name, value in values.items() if math.isfinite(value)}
    if not points:
        return
    with transaction.atomic():
        MetricPoint.objects.bulk_create(
            [MetricPoint(run=run, name=name[:80], step=step, value=value, at=Now()) for name, value in points.items()],
            ignore_conflicts=True,
        )
        if announce:
            event_append(
                project_id=run.project_id,
                topic=run_topic(run.pk),
                event_type=EventType.METRICS_RECORDED,
                actor=actor,
                data={"run": str(run.pk), "step": step, "values": points},
            )
