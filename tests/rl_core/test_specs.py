"""Specs refuse what cannot run, naming the key, and are read back as they were saved."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from rl_core.errors import SpecError
from rl_core.specs import RealtimeStage, RlStage, parse_run_spec, resolve_run_spec, run_spec_schema
from rl_core.types import SamplingParams

MINIMAL = {"model": "m", "stages": [{"kind": "rl"}]}


def test_defaults_are_filled_in_and_survive_being_saved():
    spec = parse_run_spec(MINIMAL)
    assert isinstance(spec.stages[0], RlStage)
    resolved = json.loads(json.dumps(resolve_run_spec(spec)))
    assert resolved["stages"][0]["group_size"] == spec.stages[0].group_size
    assert parse_run_spec(resolved) == spec
    assert parse_run_spec(json.dumps(resolved).encode()) == spec


def test_stages_are_told_apart_by_their_kind():
    spec = parse_run_spec({"model": "m", "stages": [{"kind": "realtime", "lane": "l"}]})
    assert isinstance(spec.stages[0], RealtimeStage)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"learning_rat": 1}, "learning_rat"),
        ({"steps": 0}, "steps"),
        ({"steps": "many"}, "$.stages[0].steps"),
        ({"group_size": 1}, "group_size"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"kind": "dreaming"}, "dreaming"),
        ({"sampling": {"temperature": 0}}, "untruncated"),
        ({"sampling": {"top_p": 0.9}}, "untruncated"),
        ({"sampling": {"top_p": 2}}, "top_p"),
        ({"optimizer": {"learning_rate": 2}}, "learning_rate"),
        ({"optimizer": {"beta1": 1}}, "beta1"),
        ({"loss": {"kind": "magic"}}, "magic"),
        ({"loss": {"ratio_low": 5, "ratio_high": 1}}, "ratio_low"),
        ({"loss": {"scale": 0}}, "scale"),
        ({"max_context_tokens": 3}, "max_context_tokens"),
        ({"max_parallel_calls": 0}, "max_parallel_calls"),
        ({"max_wall_s": -1}, "max_wall_s"),
        ({"max_sampled_tokens": -1}, "max_sampled_tokens"),
        ({"compaction": {"kind": "forget"}}, "forget"),
        ({"compaction": {"kind": "summarise", "summary_tokens": 300}}, "a quarter"),
        ({"compaction": {"summary_tokens": 1}}, "summary_tokens"),
        ({"compaction": {"request": ""}}, "request"),
    ],
)
def test_a_wrong_stage_is_refused_by_name(change, names):
    with pytest.raises(SpecError, match=names.replace("$", r"\$").replace("[", r"\[")):
        parse_run_spec({"model": "m", "stages": [{"kind": "rl", **change}]})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"minimum_answers": 1}, "minimum_answers"),
        ({"optimizer_steps": 0}, "optimizer_steps"),
        ({"loss": {"kind": "ppo_clip"}}, "single attempts"),  # an objective of its own names its advantage too
        ({"loss": {"kind": "kto", "advantage": "strata"}}, "preference"),
        ({"window": {"limit": 1}}, "limit"),
        ({"window": {"arms": []}}, "arms"),
        ({"window": {"arms": ["left"]}}, "left"),
        ({"window": {"user_cap": -1}}, "user_cap"),
        ({"window": {"outlier_minimum": 1}}, "outlier_minimum"),
        ({"window": {"weigh_by": "tag"}}, "silent"),
        ({"window": {"weight_cap": 0.5}}, "weight_cap"),
        ({"window": {"cap": 3}}, "cap"),
        ({"baseline": {"stratum": "tag"}}, "tag"),
        ({"baseline": {"tag": "task"}}, "tag"),
        ({"preference": {"beta": 0}}, "beta"),
        ({"preference": {"kto_weight": -1}}, "kto_weight"),
        ({"preference": {"desirable_from": 2}}, "desirable_from"),
        ({"preference": {"max_tokens": 0}}, "max_tokens"),
        ({"replay": {"share": 1}}, "share"),
        ({"replay": {"group_size": 1}}, "group_size"),
        ({"replay": {"max_turns": 0}}, "max_turns"),
        ({"replay": {"max_context_tokens": 3}}, "max_context_tokens"),
        ({"replay": {"sampling": {"temperature": 0}}}, "untruncated"),
    ],
)
def test_a_wrong_window_is_refused_by_name(change, names):
    with pytest.raises(SpecError, match=names):
        parse_run_spec({"model": "m", "stages": [{"kind": "realtime", "lane": "l", **change}]})


def test_specs_saved_before_windows_had_fields_are_read():
    old = {"kind": "realtime", "lane": "l", "minimum_answers": 40, "optimizer_steps": 2}
    loss = {"kind": "ppo_clip", "advantage": "responders", "ratio_low": 0.7, "ratio_high": 1.5}
    stage = parse_run_spec({"model": "m", "stages": [{**old, "loss": loss}]}).stages[0]
    assert isinstance(stage, RealtimeStage)
    assert stage.loss.advantage == "responders"
    assert not stage.rolls_out
    assert parse_run_spec({"model": "m", "stages": [{**old, "replay": {"share": 0.2}}]}).stages[0].rolls_out


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"model": "", "stages": [{"kind": "rl"}]},
        {"model": "m", "stages": []},
        {**MINIMAL, "seed": -1},
        {**MINIMAL, "spec_version": 99},
        {**MINIMAL, "kv_mode": "hope"},
        {**MINIMAL, "surprise": True},
        {"model": "m", "stages": [{"kind": "realtime"}]},
        {"model": "m", "stages": [{"kind": "realtime", "lane": "l", "minimum_answers": 1}]},
    ],
)
def test_a_wrong_run_is_refused(spec):
    with pytest.raises(SpecError):
        parse_run_spec(spec)


def test_what_is_no_json_is_refused():
    with pytest.raises(SpecError, match="JSON"):
        parse_run_spec(b"{")


def test_specs_are_frozen():
    with pytest.raises(AttributeError):
        parse_run_spec(MINIMAL).seed = 3


def test_the_schema_describes_both_stages():
    definitions = run_spec_schema()["$defs"]
    assert {"RlStage", "RealtimeStage", "RunSpec"} <= set(definitions)


@pytest.mark.parametrize(
    ("change", "trainable"),
    [({}, True), ({"temperature": 0.0}, False), ({"top_p": 0.5}, False), ({"top_k": 3}, False), ({"seed": 1}, True)],
)
def test_only_whole_distributions_are_trainable(change, trainable):
    assert msgspec.convert(change, SamplingParams).trainable is trainable


def test_specs_types_and_errors_import_without_torch():
    code = (
        "import sys, rl_core.specs, rl_core.types, rl_core.errors; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
