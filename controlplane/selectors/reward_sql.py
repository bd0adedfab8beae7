"""`controlplane.services.signals.reward_of` as one query over many generations.

A test compares the two on random feedback; whoever changes one changes the other. `{generations}` is a condition on
the generations `g` that count.
"""

from __future__ import annotations

from typing import Any

import msgspec

from controlplane.services.signals import SignalMapContent

# Each sender's newest event of a signal counts alone.
_NEWEST = """
SELECT DISTINCT ON (f.generation_id, f.sender, f.actor_hash, f.signal_id)
       g.id AS generation_id, g.canary_step, g.arm, g.version_id, g.created_at AS answered_at,
       coalesce(nullif(g.user_hash, ''), g.id::text) AS who,
       f.value, f.occurred_at, s.slug, s.value_type, s.minimum, s.maximum, coalesce(o.trust_weight, 1.0) AS trust
FROM controlplane_generation g
JOIN controlplane_feedback f ON f.generation_id = g.id AND f.state = 'joined'
JOIN controlplane_signaldefinition s ON s.id = f.signal_id
LEFT JOIN controlplane_feedbacksource o ON o.id = f.source_id
WHERE {generations}
ORDER BY f.generation_id, f.sender, f.actor_hash, f.signal_id, f.occurred_at DESC, f.id DESC
"""
_REWARDS = """
SELECT e.generation_id, e.canary_step, e.arm, e.version_id, e.who,
       sum(e.weight * e.reward) / sum(e.weight) AS reward
FROM (
    SELECT n.*, r.weight * n.trust AS weight,
           CASE WHEN n.value_type <> 'number' THEN (r.values ->> (n.value #>> '{{}}'))::float
                WHEN jsonb_typeof(n.value) = 'number' THEN
                    r.low + ((n.value #>> '{{}}')::float - n.minimum) / (n.maximum - n.minimum) * (r.high - r.low)
           END AS reward
    FROM (NEWEST) n
    JOIN jsonb_to_recordset(%(rules)s::jsonb)
      AS r(slug text, "values" jsonb, low float, high float, weight float) ON r.slug = n.slug
) e
WHERE e.reward IS NOT NULL AND e.weight > 0
GROUP BY e.generation_id, e.canary_step, e.arm, e.version_id, e.who
"""
_VALUES = """
SELECT v.generation_id, v.canary_step, v.arm, v.version_id, v.who, avg(v.number) AS reward
FROM (
    SELECT n.*, CASE jsonb_typeof(n.value)
           WHEN 'boolean' THEN (n.value #>> '{{}}')::boolean::int::float
           WHEN 'number' THEN (n.value #>> '{{}}')::float END AS number
    FROM (NEWEST) n WHERE n.slug = %(key)s
) v
WHERE v.number IS NOT NULL
GROUP BY v.generation_id, v.canary_step, v.arm, v.version_id, v.who
"""


def rewards_query(generations: str) -> str:
    """One row a generation: the reward that the map in the parameter `rules` gives it."""
    return _REWARDS.replace("NEWEST", _NEWEST).format(generations=generations)


def values_query(generations: str) -> str:
    """One row a generation: the value of the signal in the parameter `key`. True is 1, false 0, a category nothing."""
    return _VALUES.replace("NEWEST", _NEWEST).format(generations=generations)


def rule_rows(content: SignalMapContent) -> str:
    """The map's rules as a JSON array for the query."""
    rows = [{"slug": slug, **msgspec.to_builtins(rule)} for slug, rule in content.signals.items()]
    return msgspec.json.encode(rows).decode()


def longest_horizon_s(content: SignalMapContent) -> float:
    """Seconds after which no feedback can change a reward of the map any more."""
    values: list[Any] = [getattr(content, "horizon_s", 0.0)]
    values += [getattr(rule, "horizon_s", 0.0) for rule in content.signals.values()]
    return float(max(values))
