"""What a canary's users met, one row a user, arm, step and metric: one set-based query for each metric.

A generation counts for a metric of feedback once the horizon of its signal has closed: an answer whose user may still
speak says nothing of how many do, or of what they think. Latency and behaviour are known at once.

Who answers is not random: what users say is weighed by how many of their segment said anything, unless the signal map
says otherwise (`weigh_responses`), or gives silence a value.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection

from controlplane.errors import NotFound
from controlplane.models import CanaryStep, Release
from controlplane.selectors.credit import credit_query
from controlplane.selectors.reward_sql import rewards_query, values_query
from controlplane.services.signals import SignalMapContent, Silence
from controlplane.services.windows import signal_map_current
from controlplane.states import Arm
from rl_core.shipping.canary import Exposure, UserOutcome
from rl_core.shipping.specs import CadenceSpec, MetricSource, MetricSpec
from rl_core.shipping.weighting import responses_weighed

# Of one generation `g`: its value for the metric, and whether it counts.
_AT_ONCE: dict[MetricSource, tuple[str, str]] = {
    MetricSource.LATENCY: ("g.latency_ms", "g.outcome = 'answered'"),
    MetricSource.FAILURE: ("(g.outcome = 'failed')::int", "g.outcome <> 'cancelled'"),
    MetricSource.REFUSAL: ("(g.behaviour ->> 'refusal')::boolean::int", "g.behaviour ? 'refusal'"),
    MetricSource.BEHAVIOUR: (
        "CASE jsonb_typeof(g.behaviour -> %(key)s) WHEN 'boolean' THEN (g.behaviour ->> %(key)s)::boolean::int"
        " ELSE (g.behaviour ->> %(key)s)::float END",
        "jsonb_typeof(g.behaviour -> %(key)s) IN ('boolean', 'number')",
    ),
}
# Generations of users in the experiment, on either arm; and those whose feedback is complete. Their names stand for
# them in the queries below.
_COUNTED = "g.release_id = %(release)s AND g.user_hash <> '' AND g.canary_step IS NOT NULL"
_COMPLETE = f"{_COUNTED} AND g.created_at <= %(matured)s"
_USERS = """
SELECT g.canary_step, g.arm, g.user_hash, sum({value})::float, count(*)
FROM controlplane_generation g WHERE COUNTED AND {counts} GROUP BY g.canary_step, g.arm, g.user_hash
"""
_RESPONSES = """
SELECT g.canary_step, g.arm, g.user_hash, sum((g.id IN (SELECT c.generation_id FROM (CREDIT) c))::int)::float, count(*)
FROM controlplane_generation g WHERE COMPLETE AND g.outcome = 'answered'
GROUP BY g.canary_step, g.arm, g.user_hash
""".replace("CREDIT", credit_query("COMPLETE"))
_OF_FEEDBACK = """
SELECT r.canary_step, r.arm, r.who, sum(r.reward), count(*)
FROM ({rewards}) r GROUP BY r.canary_step, r.arm, r.who
"""
_EXPOSURES = """
SELECT s.position, s.share, count(DISTINCT g.user_hash) FILTER (WHERE g.arm = 'promoted'),
       count(DISTINCT g.user_hash) FILTER (WHERE g.arm = 'canary')
FROM controlplane_canarystep s
LEFT JOIN controlplane_generation g
  ON g.release_id = s.release_id AND g.canary_step = s.position AND g.user_hash <> ''
WHERE s.release_id = %(release)s
GROUP BY s.position, s.share ORDER BY s.position
"""
# Everybody whose outcomes are complete, with their segment as it was before any answer.
_SEGMENTS = """
SELECT g.canary_step, g.arm, g.user_hash, (array_agg(g.segment ORDER BY g.created_at, g.id))[1]
FROM controlplane_generation g WHERE COMPLETE GROUP BY g.canary_step, g.arm, g.user_hash
"""
_SPOKEN = {MetricSource.SIGNAL_REWARD, MetricSource.SIGNAL}  # what only those say who say anything


@dataclass(frozen=True, slots=True)
class CanaryRows:
    """All that a look is judged by. `matured` counts the latest step's users with outcomes that are complete."""

    metrics: dict[str, list[UserOutcome]]
    exposures: list[Exposure]
    matured: dict[Arm, int]


def canary_rows(*, release: Release, spec: CadenceSpec, step: CanaryStep, now: datetime) -> CanaryRows:
    """Read everything as it stands at `now`, the database's."""
    content = _signal_map(release)
    horizon_s = max(spec.horizon_s, content.longest_horizon_s if content else 0.0)
    base = {"release": release.pk, "matured": now - timedelta(seconds=horizon_s)}
    segments = {(int(row[0]), row[1], row[2]): str(row[3]) for row in _rows(_SEGMENTS, base)}
    metrics = {metric.name: _outcomes(metric, content, base) for metric in spec.canary.metrics}
    for metric in spec.canary.metrics:
        if _weighed(metric, content):
            metrics[metric.name] = responses_weighed(metrics[metric.name], segments)
    exposures = [(int(row[0]), float(row[1]), int(row[2]), int(row[3])) for row in _rows(_EXPOSURES, base)]
    matured = Counter(Arm(arm) for number, arm, _ in segments if number == step.position)
    return CanaryRows(metrics, exposures, dict(matured))


def _weighed(metric: MetricSpec, content: SignalMapContent | None) -> bool:
    """Whether those who answer stand for those who do not, as in the windows that train."""
    if metric.source not in _SPOKEN or (content is not None and not content.weigh_responses):
        return False
    return metric.source is MetricSource.SIGNAL or content is None or content.silence is Silence.DROP


def _signal_map(release: Release) -> SignalMapContent | None:
    try:
        return signal_map_current(project=release.lane.project)
    except NotFound:
        return None


def _outcomes(metric: MetricSpec, content: SignalMapContent | None, base: dict[str, Any]) -> list[UserOutcome]:
    parameters = {**base, "key": metric.key}
    if metric.source in _AT_ONCE:
        value, counts = _AT_ONCE[metric.source]
        query = _USERS.format(value=value, counts=counts)
    elif metric.source is MetricSource.RESPONSE_RATE:
        query = _RESPONSES
    elif metric.source is MetricSource.SIGNAL:
        query = _OF_FEEDBACK.format(rewards=values_query(_COMPLETE))
    elif content is None:
        return []
    else:
        rewards, values = rewards_query(_COMPLETE, content)
        query = _OF_FEEDBACK.format(rewards=rewards)
        parameters.update(values)
    return [
        UserOutcome(stratum=int(stratum), arm=arm, total=float(total), count=int(count), user=user)
        for stratum, arm, user, total, count in _rows(query, parameters)
    ]


def _rows(query: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(query.replace("COMPLETE", _COMPLETE).replace("COUNTED", _COUNTED), parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows
