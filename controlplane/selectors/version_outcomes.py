"""How the answers of two of a lane's versions behave, and what users said of them: for the monitors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connection

from controlplane.errors import NotFound
from controlplane.models import Lane, PolicyVersion, Release
from controlplane.selectors.reward_sql import rewards_query
from controlplane.services.cadence import cadence_of
from controlplane.services.clock import database_now
from controlplane.services.windows import signal_map_current
from controlplane.states import Arm, ReleaseState
from rl_core.shipping.canary import UserOutcome

NEWEST = 20_000  # answers of each version that are looked at

_BEHAVIOURS = """
SELECT g.version_id, coalesce(nullif(g.user_hash, ''), g.id::text), b.key,
       sum(CASE jsonb_typeof(b.value) WHEN 'boolean' THEN (b.value #>> '{}')::boolean::int
           ELSE (b.value #>> '{}')::float END)::float,
       count(*)
FROM (
    (SELECT * FROM controlplane_generation WHERE lane_id = %(lane)s AND version_id = %(version)s
     AND outcome = 'answered' ORDER BY created_at DESC LIMIT %(newest)s)
    UNION ALL
    (SELECT * FROM controlplane_generation WHERE lane_id = %(lane)s AND version_id = %(baseline)s
     AND outcome = 'answered' ORDER BY created_at DESC LIMIT %(newest)s)
) g CROSS JOIN LATERAL jsonb_each(g.behaviour) b(key, value)
WHERE b.key = ANY(%(keys)s) AND jsonb_typeof(b.value) IN ('boolean', 'number')
GROUP BY 1, 2, 3
"""
_REWARDS = "SELECT r.who, sum(r.reward), count(*) FROM ({rewards}) r GROUP BY r.who"
_ANSWERED = "g.lane_id = %(lane)s AND g.version_id = %(version)s AND g.created_at <= %(matured)s"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One behaviour of two versions, a row a user: the baseline's as `promoted`, the version's as `canary`."""

    key: str
    baseline: PolicyVersion
    outcomes: list[UserOutcome] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gain:
    """One promotion: what its gate measured, and what users said before and after."""

    version: PolicyVersion
    gate: float
    before: list[UserOutcome]
    after: list[UserOutcome]


def behaviours_of(
    *, lane: Lane, version: PolicyVersion, baseline: PolicyVersion, keys: Sequence[str], newest: int = NEWEST
) -> list[Behaviour]:
    """The newest answers of both versions, by user. A request without a user key is a user of its own."""
    found = {key: Behaviour(key, baseline) for key in keys}
    parameters: dict[str, Any] = {
        "lane": lane.pk,
        "version": version.pk,
        "baseline": baseline.pk,
        "newest": newest,
        "keys": list(keys),
    }
    with connection.cursor() as cursor:
        cursor.execute(_BEHAVIOURS, parameters)
        rows = cursor.fetchall()
    for version_id, who, key, total, count in rows:
        arm = Arm.CANARY if version_id == version.pk else Arm.PROMOTED
        seen = found[key]
        seen.outcomes.append(UserOutcome(stratum=0, arm=arm.value, total=total, count=count, user=who))
        seen.answers[arm.value] = seen.answers.get(arm.value, 0) + count
    return list(found.values())


def gains_of(*, lane: Lane, count: int) -> list[Gain]:
    """The last promotions in a row that led to what answers now, the oldest first."""
    rows = Release.objects.filter(lane=lane, state=ReleaseState.PROMOTED).select_related("version", "incumbent")
    line: list[Release] = []
    wanted = lane.promoted_version_id
    for release in rows.order_by("-promoted_at")[: 4 * count]:
        if release.version_id == wanted and len(line) < count:
            line.insert(0, release)
            wanted = release.incumbent_id
    said: dict[tuple[UUID, Arm], list[UserOutcome]] = defaultdict(list)
    gains = []
    for release in line:
        if release.incumbent is None or "difference" not in release.gate:
            continue
        for version, arm in ((release.incumbent, Arm.PROMOTED), (release.version, Arm.CANARY)):
            if (version.pk, arm) not in said:
                said[version.pk, arm] = _said(lane, version, arm)
        before, after = said[release.incumbent.pk, Arm.PROMOTED], said[release.version.pk, Arm.CANARY]
        gains.append(Gain(release.version, float(release.gate["difference"]), before, after))
    return gains


def _said(lane: Lane, version: PolicyVersion, arm: Arm) -> list[UserOutcome]:
    """What users' feedback rewards the version with, by user."""
    try:
        content = signal_map_current(project=lane.project)
    except NotFound:
        return []
    spec = cadence_of(lane)
    horizon_s = max(content.longest_horizon_s, spec.horizon_s if spec else 0.0)
    rewards, values = rewards_query(_ANSWERED, content)
    parameters: dict[str, Any] = {
        "lane": lane.pk,
        "version": version.pk,
        "matured": database_now() - timedelta(seconds=horizon_s),
        **values,
    }
    with connection.cursor() as cursor:
        cursor.execute(_REWARDS.format(rewards=rewards), parameters)
        rows = cursor.fetchall()
    return [
        UserOutcome(stratum=0, arm=arm.value, total=float(total), count=int(count), user=who)
        for who, total, count in rows
    ]
