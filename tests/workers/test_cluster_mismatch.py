"""The mismatch that the trainer tells of rollouts is written down by the cluster that made them."""

from __future__ import annotations

import random

import pytest

from controlplane.models import Replica, Rollout
from controlplane.services.metrics import MISMATCH_OF
from tests.factories import furnish, make_workspace
from tests.playing import batch_step, start_run
from workers.train import step_metrics

pytestmark = pytest.mark.django_db


def test_mismatch_is_told_by_cluster() -> None:
    step = batch_step(start_run(furnish(make_workspace(), train=8)), skill=0.5, luck=random.Random(1))
    west, east = (Replica.objects.get(cluster__slug=f"rollout-{side}") for side in ("west", "east"))
    rollouts = [item.rollout_id for item in step.batch.order_by("position")]
    Rollout.objects.filter(pk__in=rollouts).update(replica=west)
    Rollout.objects.filter(pk__in=rollouts[:2]).update(replica=east)
    Rollout.objects.filter(pk=rollouts[-1]).update(replica=None)
    k3 = {str(rollout): 1e-4 * (place + 1) for place, rollout in enumerate(rollouts)}
    del k3[str(rollouts[2])]  # nothing of it was trained on
    told = {"step": 1, "entropy": None, "k3_rollouts": k3}
    answer = {"metrics": told, "bytes": 5, "full_bytes": 50, "changed_elements": 1, "elements": 10}
    values = step_metrics(step, answer, busy_s=3.0)
    assert values[f"{MISMATCH_OF}rollout-east"] == pytest.approx(1.5e-4)
    kept = range(3, len(rollouts) - 1)
    assert values[f"{MISMATCH_OF}rollout-west"] == pytest.approx(1e-4 * sum(n + 1 for n in kept) / len(kept))
    assert {name for name in values if name.startswith(MISMATCH_OF)} == {
        f"{MISMATCH_OF}rollout-east",
        f"{MISMATCH_OF}rollout-west",
    }
    assert all(isinstance(value, int | float) for value in values.values())
    assert "k3_rollouts" in told  # the answer itself is left as it was
