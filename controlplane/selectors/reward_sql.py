"""`controlplane.services.signals.reward_of` as one query over many generations.

A test compares the two on random feedback; whoever changes one changes the other. `{generations}` is a condition on
the generations `g` that count. Each row: canary step, arm, version, user (or the generation, without a user key), and
what the feedback on one generation comes to.
"""

from __future__ import annotations

from typing import Any

import msgspec

from controlplane.selectors.credit import credit_query
from controlplane.services.signals import SignalMapContent, Silence

# An actor's newest event of a signal counts alone; its clock is believed between the answer and the event's arrival.
_NEWEST = """
SELECT DISTINCT ON (c.generation_id, c.sender, c.signal_id, c.actor_hash)
       c.generation_id, c.sender, s.slug, s.value_type, s.minimum, s.maximum, c.value, c.distance,
       coalesce(o.trust_weight, 1.0) AS trust,
       extract(epoch FROM least(greatest(c.occurred_at, c.answered_at), greatest(c.created_at, c.answered_at))
                          - c.answered_at)::float AS elapsed_s
FROM (CREDIT) c
JOIN controlplane_signaldefinition s ON s.id = c.signal_id
LEFT JOIN controlplane_feedbacksource o ON o.id = c.source_id
ORDER BY c.generation_id, c.sender, c.signal_id, c.actor_hash, c.occurred_at DESC, c.id DESC
"""
# The actors of one sender share its one voice on a signal.
_HEARD = """
SELECT v.generation_id, sum(v.weight * v.value) / sum(v.weight) AS reward
FROM (
    SELECT e.generation_id, e.weight * sum(e.kept) / count(*) AS weight, sum(e.kept * e.reward) / sum(e.kept) AS value
    FROM (
        SELECT n.generation_id, n.sender, n.slug, r.weight * n.trust AS weight,
               power(%(discount)s::float, n.distance)
               * CASE WHEN r.half_life_s > 0 THEN power(0.5::float, n.elapsed_s / r.half_life_s) ELSE 1.0 END AS kept,
               CASE WHEN n.value_type <> 'number' THEN (r.values ->> (n.value #>> '{{}}'))::float
                    WHEN jsonb_typeof(n.value) = 'number' THEN
                        r.low + ((n.value #>> '{{}}')::float - n.minimum) / (n.maximum - n.minimum) * (r.high - r.low)
               END AS reward
        FROM (NEWEST) n
        JOIN jsonb_to_recordset(%(rules)s::jsonb) AS r(
            slug text, "values" jsonb, low float, high float, weight float,
            delay_s float, half_life_s float, horizon_s float
        ) ON r.slug = n.slug
        WHERE n.elapsed_s >= r.delay_s AND (r.horizon_s = 0 OR n.elapsed_s <= r.horizon_s)
    ) e
    WHERE e.reward IS NOT NULL
    GROUP BY e.generation_id, e.sender, e.slug, e.weight
    HAVING sum(e.kept) > 0
) v
GROUP BY v.generation_id
"""
# Materialised: where statistics lag behind a young table, a plan would hear everybody anew for each generation.
_SPOKEN = """
WITH h AS MATERIALIZED (HEARD)
SELECT g.canary_step, g.arm, g.version_id, coalesce(nullif(g.user_hash, ''), g.id::text) AS who, h.reward
FROM controlplane_generation g JOIN h ON h.generation_id = g.id WHERE {generations}
"""
_WITH_SILENCE = """
WITH h AS MATERIALIZED (HEARD)
SELECT g.canary_step, g.arm, g.version_id, coalesce(nullif(g.user_hash, ''), g.id::text) AS who,
       coalesce(h.reward, %(silence)s) AS reward
FROM controlplane_generation g LEFT JOIN h ON h.generation_id = g.id
WHERE {generations} AND (h.reward IS NOT NULL OR g.outcome = 'answered')
"""
# One signal as a number: true is 1, false 0; a category has no number and does not count.
_NUMBERS = """
SELECT n.generation_id, avg(CASE jsonb_typeof(n.value)
       WHEN 'boolean' THEN (n.value #>> '{{}}')::boolean::int::float
       WHEN 'number' THEN (n.value #>> '{{}}')::float END) AS reward
FROM (NEWEST) n WHERE n.slug = %(key)s AND jsonb_typeof(n.value) IN ('boolean', 'number')
GROUP BY n.generation_id
"""


def rewards_query(generations: str, content: SignalMapContent) -> tuple[str, dict[str, Any]]:
    """The reward that the map gives each generation, silence included where it has a value; and its parameters."""
    valued = content.silence is Silence.VALUE
    outer = _WITH_SILENCE if valued else _SPOKEN
    rules = [
        {"slug": slug, **msgspec.to_builtins(rule), "horizon_s": content.horizon_of(slug)}
        for slug, rule in content.signals.items()
    ]
    parameters = {
        "rules": msgspec.json.encode(rules).decode(),
        "silence": content.silence_value,
        "discount": content.episode_discount,
    }
    return _filled(outer, _HEARD, generations), parameters


def values_query(generations: str) -> str:
    """The value that one signal, the parameter `key`, gave each generation; an episode's to each of its turns."""
    return _filled(_SPOKEN, _NUMBERS, generations)


def _filled(outer: str, heard: str, generations: str) -> str:
    query = outer.replace("HEARD", heard).replace("NEWEST", _NEWEST).format(generations=generations)
    return query.replace("CREDIT", credit_query(generations))
