"""Rubrics: hashes, kinds, and failures that are never scores."""

import pytest

from rl_core.environments.criteria import CRITERIA, CriterionKind, defined_functions
from rl_core.environments.reward import Criterion, CriterionScore, Rubric, combine, grade, parse_rubric
from rl_core.errors import EnvironmentFault, SpecError, WorldError
from rl_core.types import Ending, Message, Role, ToolCall, Trajectory
from tests.rl_core.environments.factories import a_task


def a_rubric(*rows, slug="r"):
    return Rubric(
        slug=slug,
        criteria=tuple(
            Criterion(key=f"k{i}", text="t", kind=k, weight=w, params=p) for i, (k, w, p) in enumerate(rows)
        ),
    )


def a_trajectory(*turns, calls=(), candidate=None, tool_read=True):
    messages = [Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, content="Answer: 6")]
    for i, turn in enumerate(turns):
        messages.append(Message(role=Role.ASSISTANT, content=turn, segment=0))
        if i < len(turns) - 1:
            messages.append(Message(role=Role.TOOL, content="r", segment=0 if tool_read else -1))
    return Trajectory(
        task_id="t1",
        messages=messages,
        segments=[],
        tool_calls=[ToolCall(tool="t", arguments="a", result=r, ok=ok, turn=i) for i, (r, ok) in enumerate(calls)],
        ending=Ending.TERMINATED,
        artifacts={"candidate": candidate} if candidate is not None else {},
    )


async def value(kind, params, trajectory, sandbox=None, **reference):
    [score] = await grade(
        a_rubric((kind, 1.0, params)), task=a_task(**reference), trajectory=trajectory, sandbox=sandbox
    )
    return score.value if score.error is None else score.error


@pytest.mark.parametrize(
    ("text", "fact", "expected"),
    [
        ("It has Eight legs.", ["8", "eight"], 1.0),
        ("It has eighty legs.", ["8", "eight"], 0.0),
        ("It has 8 legs.", ["8", "eight"], 1.0),
        ("About 80.", ["8"], 0.0),
        ("They are acorns.", ["acorn*"], 1.0),
        ("They are popcorns.", ["corn*"], 0.0),
        ("A (b).", ["(b)"], 1.0),
    ],
)
async def test_a_fact_is_a_whole_word_or_a_stem(text, fact, expected):
    assert await value("states_fact", {}, a_trajectory(text), fact=fact) == expected


def test_every_kind_has_a_row():
    assert set(CRITERIA) == set(CriterionKind)


@pytest.mark.parametrize(
    ("kind", "params", "trajectory", "expected"),
    [
        ("tool_ran", {}, a_trajectory("x", calls=[("6", True)]), 1.0),
        ("tool_ran", {}, a_trajectory("x", calls=[("6", False)]), 0.0),
        ("tool_ran", {}, a_trajectory("x"), 0.0),
        ("tool_result_right", {}, a_trajectory("x", calls=[("6", True)]), 1.0),
        ("tool_result_right", {}, a_trajectory("x", calls=[("6", True), ("7", True)]), 0.0),
        ("tool_result_right", {}, a_trajectory("x", calls=[("6", False)]), 0.0),
        ("final_number_right", {}, a_trajectory("c", "Answer: 6"), 1.0),
        ("final_number_right", {}, a_trajectory("c", "Answer: 6.0 pens"), 1.0),
        ("final_number_right", {}, a_trajectory("c", "Answer: 60"), 0.0),
        ("final_number_right", {}, a_trajectory("c", "6"), 0.0),
        ("final_number_right", {}, a_trajectory("c", "Answer: 5 Answer: 6"), 0.0),
        ("final_number_right", {}, a_trajectory("c", "Answer: 6 Answer: 6"), 1.0),
        ("final_number_right", {}, a_trajectory("Answer: 6"), 0.0),
        ("final_number_right", {}, a_trajectory("c", "Answer: 6", tool_read=False), 0.0),
        ("final_number_right", {"after_tool": False}, a_trajectory("Answer: 6"), 1.0),
        ("exact", {"text": " yes"}, a_trajectory("yes "), 1.0),
        ("exact", {"text": "yes"}, a_trajectory("Yes"), 0.0),
        ("regex", {"pattern": r"^\w+$"}, a_trajectory("yes"), 1.0),
        ("regex", {"pattern": "sorry", "absent": True}, a_trajectory("sorry"), 0.0),
        ("max_length", {"words": 2}, a_trajectory("a b"), 1.0),
        ("max_length", {"words": 2}, a_trajectory("a b c"), 0.0),
        ("max_length", {"words": 2, "at_least": 1}, a_trajectory("a"), 1.0),
        ("max_length", {"words": 2, "at_least": 1}, a_trajectory(""), 0.0),
        ("visible_tests", {}, a_trajectory("x", calls=[("PASS", True), ("no", False)]), 0.0),
        ("hidden_tests", {}, a_trajectory("x", calls=[("no", False)]), 0.0),
    ],
)
async def test_kinds(kind, params, trajectory, expected):
    assert await value(kind, params, trajectory, answer="6") == expected


async def test_a_pattern_that_backtracks_without_end_is_an_error_not_a_score():
    pattern = "(a|aa)+$"  # not among those that are plainly nested
    assert await value("regex", {"pattern": pattern}, a_trajectory("a" * 50)) == 1.0
    assert "took longer" in str(await value("regex", {"pattern": pattern}, a_trajectory("a" * 500 + "b")))


async def test_the_prompts_own_turns_are_not_graded():
    assert await value("final_number_right", {"after_tool": False}, a_trajectory(), answer="6") == 0.0


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def f(x): return x", {"f"}),
        ("class A:\n  def f(self): pass", set()),
        ("f = 1", set()),
        ("def f(", set()),
        ("(" * 5000, set()),
        ("-" * 15000 + "1", set()),
        ("def f(): pass\0", set()),
    ],
)
def test_functions_are_found_by_parsing(code, names):
    assert defined_functions(code) == names


async def test_defines_function():
    assert await value("defines_function", {}, a_trajectory("x", candidate="def f(): 1"), function="f") == 1.0
    assert await value("defines_function", {}, a_trajectory("x"), function="f") == 0.0


async def test_a_graders_failure_is_an_error_and_no_reward():
    class Down:
        async def run(self, *args, **kwargs):
            raise WorldError("sandboxd is gone")

    trajectory = a_trajectory("x", calls=[("PASS", True)], candidate="def f(): 1")
    reference = {"function": "f", "visible": {"args": [], "result": 1}, "hidden": [{"args": [], "result": 1}]}
    assert "world_error: sandboxd is gone" in await value("hidden_tests", {}, trajectory, Down(), **reference)
    assert "sandbox_refused" in await value("hidden_tests", {}, trajectory, None, **reference)
    assert "task_set_invalid" in await value("tool_result_right", {}, trajectory, None, other=1)
    rubric = a_rubric(("tool_ran", 1.0, {}))
    with pytest.raises(EnvironmentFault, match="k0 has no score"):
        combine(rubric, [CriterionScore(key="k0", value=None, reason="", error="boom")])
    with pytest.raises(EnvironmentFault, match="not graded"):
        combine(rubric, [])


def test_reward_is_the_weighted_mean():
    rubric = a_rubric(("tool_ran", 1.0, {}), ("tool_result_right", 3.0, {}), ("visible_tests", 0.0, {}))
    scores = [CriterionScore(key=f"k{i}", value=v, reason="") for i, v in enumerate((1.0, 0.5, 0.0))]
    assert combine(rubric, scores) == pytest.approx(2.5 / 4)


def test_the_hash_names_the_content():
    one, same, other = (a_rubric(("tool_ran", w, {})) for w in (1.0, 1.0, 0.5))
    assert one.content_hash == same.content_hash == parse_rubric(one.to_json()).content_hash != other.content_hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"criteria": []}, "rewards nothing"),
        ({"slug": "Bad Slug"}, "slug"),
        ({"colour": "red"}, "colour"),
        ({"criteria": [{"key": "a", "text": "", "kind": "magic", "weight": 1}]}, "magic"),
        ({"criteria": [{"key": "a", "text": "", "kind": "exact", "weight": 1}]}, "text"),
        (
            {"criteria": [{"key": "a", "text": "", "kind": "tool_ran", "weight": 1, "params": {"x": 1}}]},
            "unknown field",
        ),
        ({"criteria": [{"key": "a", "text": "", "kind": "tool_ran", "weight": -1}]}, "weight"),
        ({"criteria": [{"key": "A!", "text": "", "kind": "tool_ran", "weight": 1}]}, "key"),
        ({"criteria": [{"key": "a", "text": "", "kind": "tool_ran", "weight": 1}] * 2}, "same key"),
        ({"criteria": [{"key": "a", "text": "", "kind": "regex", "weight": 1, "params": {"pattern": "("}}]}, "compile"),
        (
            {"criteria": [{"key": "a", "text": "", "kind": "regex", "weight": 1, "params": {"pattern": "(a+)+$"}}]},
            "nests",
        ),
    ],
)
def test_rubrics_that_are_refused(change, message):
    data = {"slug": "r", "criteria": [{"key": "a", "text": "t", "kind": "tool_ran", "weight": 1}], **change}
    with pytest.raises(SpecError, match=message):
        parse_rubric(data)
