"""A cadence refuses what cannot work, naming the key, and is read back as it was saved."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rl_core.errors import SpecError
from rl_core.shipping.specs import (
    CadenceSpec,
    DateFreeze,
    MetricSource,
    OnceFreeze,
    WeeklyFreeze,
    cadence_parse,
    cadence_resolve,
    cadence_schema,
)

GOAL = {"name": "a", "source": "signal_reward", "role": "goal", "direction": "higher", "margin": 0.1}
RAIL = {"name": "b", "source": "failure", "role": "guardrail", "direction": "lower", "margin": 0.1}
WHOLE = {
    "interval_s": 18_000,
    "minimum_signals": 300,
    "timezone": "America/New_York",
    "freezes": [
        {"kind": "weekly", "days": [4], "start": "18:00", "end": "06:00"},
        {"kind": "date", "date": "2026-12-25"},
        {"kind": "once", "start": "2026-01-01T00:00:00Z", "end": "2026-01-02T00:00:00+01:00"},
    ],
    "stage": {"optimizer_steps": 3},
    "canary": {"steps": [0.05, 0.5], "metrics": [GOAL, RAIL | {"alpha_share": 0.25}]},
}


def test_a_cadence_survives_being_saved():
    spec = cadence_parse(WHOLE)
    assert [type(freeze) for freeze in spec.freezes] == [WeeklyFreeze, DateFreeze, OnceFreeze]
    saved = json.dumps(cadence_resolve(spec))
    assert cadence_parse(json.loads(saved)) == spec == cadence_parse(saved.encode())


def test_a_deadline_is_resolved_from_the_interval():
    assert cadence_resolve(cadence_parse({"interval_s": 600}))["deadline_s"] == 2400
    assert cadence_parse({"interval_s": 600, "deadline_s": 700}).deadline_s == 700
    assert cadence_parse({}).deadline_s == 86_400


def test_alpha_is_split_over_metrics_and_none_is_spent_twice():
    spec = cadence_parse(WHOLE).canary
    assert (spec.alpha_of("a"), spec.alpha_of("b")) == pytest.approx((0.0375, 0.0125))
    defaults = CadenceSpec().canary
    assert sum(defaults.alpha_of(metric.name) for metric in defaults.metrics) == pytest.approx(defaults.alpha)
    assert len({defaults.alpha_of(metric.name) for metric in defaults.metrics[1:]}) == 1
    with pytest.raises(KeyError):
        spec.alpha_of("c")


def test_the_range_of_rates_is_known():
    known = {source for source in MetricSource if source.span == 1}
    assert known == {MetricSource.FAILURE, MetricSource.REFUSAL, MetricSource.RESPONSE_RATE}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"intervall_s": 1}, "intervall_s"),
        ({"interval_s": -1}, "interval_s"),
        ({"interval_s": "often"}, "interval_s"),
        ({"horizon_s": -1}, "horizon_s"),
        ({"timezone": "Mars/Olympus"}, "timezone"),
        ({"timezone": "../passwd"}, "timezone"),
        ({"stage": {"lane": "x"}}, "lane"),
        ({"spec_version": 2}, "spec_version"),
        ({"freezes": [{"kind": "yearly"}]}, "yearly"),
        ({"freezes": [{"kind": "weekly", "days": []}]}, "days"),
        ({"freezes": [{"kind": "weekly", "days": [7]}]}, "days"),
        ({"freezes": [{"kind": "weekly", "days": [1], "start": "9:00"}]}, "9:00"),
        ({"freezes": [{"kind": "weekly", "days": [1], "start": "09:00Z"}]}, "09:00Z"),
        ({"freezes": [{"kind": "weekly", "days": [1], "start": "24:00", "end": "01:00"}]}, "24:00"),
        ({"freezes": [{"kind": "weekly", "days": [1], "start": "09:00", "end": "09:00"}]}, "nothing is frozen"),
        ({"freezes": [{"kind": "weekly", "days": [0, 1, 2, 3, 4, 5, 6]}]}, "whole week"),
        ({"freezes": [{"kind": "date", "date": "2026-02-30"}]}, "date"),
        ({"freezes": [{"kind": "once", "start": "2026-01-01T00:00:00", "end": "2026-01-02T00:00:00"}]}, "offset"),
        ({"freezes": [{"kind": "once", "start": "2026-01-02T00:00:00Z", "end": "2026-01-01T00:00:00Z"}]}, "after"),
        ({"gate": {"margin": 1}}, "margin"),
        ({"gate": {"tasks": 0}}, "tasks"),
        ({"shadow": {"prompts": -1}}, "prompts"),
        ({"monitors": {"threshold": 0}}, "threshold"),
        ({"monitors": {"behaviours": ["edits", "edits"]}}, "behaviours"),
        ({"canary": {"steps": [0.1, 0.1]}}, "rise"),
        ({"canary": {"steps": [0, 0.1]}}, "steps"),
        ({"canary": {"steps": [0.5, 1]}}, "steps"),
        ({"canary": {"alpha": 0}}, "alpha"),
        ({"canary": {"minimum_users": 1}}, "minimum_users"),
        ({"canary": {"metrics": []}}, "goal"),
        ({"canary": {"metrics": [RAIL]}}, "goal"),
        ({"canary": {"metrics": [GOAL, GOAL]}}, "different names"),
        ({"canary": {"metrics": [GOAL | {"alpha_share": 0.6}, RAIL | {"alpha_share": 0.6}]}}, "at most 1"),
        ({"canary": {"metrics": [GOAL | {"alpha_share": 1}, RAIL]}}, "leaves nothing"),
        ({"canary": {"metrics": [GOAL | {"source": "signal"}]}}, "key"),
        ({"canary": {"metrics": [GOAL | {"key": "thumbs"}]}}, "key"),
        ({"canary": {"metrics": [GOAL | {"margin": -0.1}]}}, "margin"),
        ({"canary": {"metrics": [GOAL | {"name": "A b"}]}}, "name"),
        ({"canary": {"metrics": [{"name": "a", "source": "latency", "role": "goal"}]}}, "direction"),
        (b"{", "JSON"),
    ],
)
def test_a_wrong_cadence_is_refused_by_name(change, names):
    with pytest.raises(SpecError, match=names):
        cadence_parse(change)


def test_a_lane_may_have_no_canary_at_all():
    assert cadence_parse({"canary": {"steps": [], "metrics": []}}).canary.steps == ()


def test_the_schema_names_every_kind_of_freeze():
    text = json.dumps(cadence_schema())
    assert all(f'"{kind}"' in text for kind in ("weekly", "date", "once"))


def test_what_the_conductor_imports_brings_no_numpy():
    code = (
        "import sys, rl_core.shipping.canary, rl_core.shipping.freezes, rl_core.shipping.power;"
        "print([name for name in ('numpy', 'torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
