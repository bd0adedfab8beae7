"""Criteria of what was said: numbers within tolerances, JSON within schemas, artefacts."""

from __future__ import annotations

import json
import time

import pytest

from rl_core.environments.reward import Criterion
from rl_core.errors import SpecError
from tests.rl_core.environments.criteria.grading_rig import said, scored, serving


@pytest.mark.parametrize(
    ("params", "text", "expected"),
    [
        ({}, "6", 1.0),
        ({}, "It is 6.0 metres", 1.0),
        ({}, "6.01", 0.0),
        ({"absolute": 0.01}, "6.01", 1.0),
        ({"absolute": 0.01}, "6.02", 0.0),
        ({"relative": 0.1}, "5.4", 1.0),
        ({"relative": 0.1}, "5.3", 0.0),
        ({"value": -1500, "relative": 0.01}, "−1,501.5", 1.0),
        ({"value": 3e8, "relative": 0.01}, "2.998e8 m/s", 1.0),
        ({"value": 0.5}, ".5", 1.0),
        ({}, "5 or 6", 0.0),
        ({}, "6, that is 6", 1.0),
        ({"label": "x ="}, "y = 5, x = 6", 1.0),
        ({"label": "x ="}, "6", 0.0),
        ({}, "nan", 0.0),
        ({}, "6e999", 0.0),
        ({}, "v6", 0.0),
        ({}, "", 0.0),
    ],
)
async def test_a_number_is_right_within_its_tolerance(params, text, expected):
    assert (await scored("number", params, said(text))).value == expected


async def test_a_reference_that_is_no_number_is_an_error():
    assert "no number" in (await scored("number", {}, said("6"), reference={"answer": "six"})).error
    assert "task_set_invalid" in (await scored("number", {}, said("6"), reference={"other": 1})).error


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1}, "tag": {"pattern": "^[a-z]+$"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ('{"n": 1}', 1.0, "fits"),
        (' \n{"n": 2, "tag": "ab"}\n', 1.0, "fits"),
        ('```json\n{"n": 1}\n```', 1.0, "fits"),
        ('```\n{"n": 1}\n```', 1.0, "fits"),
        ('Here: {"n": 1}', 0.0, "not JSON"),
        ('{"n": 0}', 0.0, r"$.n"),
        ('{"n": 1, "more": 2}', 0.0, "more"),
        ('{"n": 1, "tag": "A"}', 0.0, "does not match"),
        ('{"n": NaN}', 0.0, "not JSON"),
        ("[" * 100_000, 0.0, "not JSON"),
        ("", 0.0, "not JSON"),
    ],
)
async def test_json_must_fit_the_schema(text, expected, reason):
    score = await scored("json_schema", {"schema": SCHEMA}, said(text))
    assert score.value == expected
    assert reason in score.reason


async def test_an_artefact_can_be_what_is_looked_at():
    work = said("done", artifacts={"report": '{"n": 3}'})
    assert (await scored("json_schema", {"schema": SCHEMA, "artifact": "report"}, work)).value == 1.0
    assert (await scored("json_schema", {"schema": SCHEMA, "artifact": "gone"}, work)).value == 0.0
    assert (await scored("exact", {"text": '{"n": 3}', "artifact": "report"}, work)).value == 1.0


BRANCHING = {
    "$defs": {"t": {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["b"]}] * 3}},
    "$ref": "#/$defs/t",
}


@pytest.mark.parametrize(
    ("schema", "text", "message"),
    [
        ({"pattern": "(a|aa)+$"}, json.dumps("a" * 400 + "b"), "too long"),
        (BRANCHING, '{"a":' * 40 + "1" + "}" * 40, "steps"),
        ({"$ref": "https://schemas.example/x.json"}, "1", "cannot be checked"),
        ({"$ref": "#"}, "1", "cannot be checked"),
    ],
)
async def test_a_schema_that_takes_for_ever_or_leads_elsewhere_is_an_error_not_a_score(schema, text, message):
    started = time.monotonic()
    score = await scored("json_schema", {"schema": schema}, said(text))
    assert score.value is None
    assert message in score.error
    assert time.monotonic() - started < 10


async def test_a_schema_fetches_nothing():
    with serving(lambda body: (200, b"{}")) as server:
        score = await scored("json_schema", {"schema": {"$ref": f"{server.url}/any.json"}}, said("1"))
        assert server.got == []
    assert score.value is None


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("json_schema", {"schema": {"type": "colour"}}, "schema is none"),
        ("json_schema", {"schema": {"pattern": "("}}, "does not compile"),
        ("json_schema", {"schema": {"properties": {"a": {"patternProperties": {"x": {}}}}}}, "patternProperties"),
        ("json_schema", {"schema": {"description": "x" * 30_000}}, "at most"),
        ("number", {"absolute": -1}, "negative"),
        ("number", {"value": float("inf")}, "finite"),
        ("judge", {"url": "https://a.example/v1", "model": "m", "votes": 2}, "odd"),
        ("judge", {"url": "https://a.example/v1", "model": "m", "votes": 11}, "votes"),
        ("judge", {"url": "https://a.example/v1", "model": "m", "api_key": "sk-1"}, "api_key"),
        ("user_signal", {"signal": "thumbs", "worst": 1, "best": 1}, "two numbers"),
        ("command", {"argv": []}, "argv"),
        ("command", {"argv": ["true"], "wall_s": 601}, "wall_s"),
        ("unit_tests", {"memory_mib": 1}, "memory_bytes"),
    ],
)
def test_parameters_that_are_refused_when_the_rubric_is_published(kind, params, message):
    with pytest.raises(SpecError, match=message):
        Criterion(key="a", text="t", kind=kind, weight=1, params=params)


@pytest.mark.parametrize("kind", ["test_gap", "impossible_passed", "tests_touched"])
def test_what_is_watched_is_never_rewarded(kind):
    assert Criterion(key="a", text="t", kind=kind, weight=0).weight == 0
    with pytest.raises(SpecError, match="never rewarded"):
        Criterion(key="a", text="t", kind=kind, weight=0.1)


@pytest.mark.parametrize(
    ("params", "value", "expected"),
    [
        ({}, 1, 1.0),
        ({}, 0.25, 0.25),
        ({"worst": -1}, 0, 0.5),
        ({"worst": -1}, -3, 0.0),
        ({"worst": 10, "best": 0}, 2.5, 0.75),
        ({"best": 4}, 9, 1.0),
    ],
)
async def test_a_users_signal_counts_between_worst_and_best(params, value, expected):
    score = await scored("user_signal", {"signal": "thumbs", **params}, said("x"), signals={"thumbs": value})
    assert score.value == pytest.approx(expected)


async def test_a_user_who_said_nothing_is_no_score():
    score = await scored("user_signal", {"signal": "thumbs"}, said("x"), signals={"other": 1.0})
    assert (score.value, score.retryable) == (None, True)
    assert "grader_failed: no value of the signal 'thumbs'" in score.error
