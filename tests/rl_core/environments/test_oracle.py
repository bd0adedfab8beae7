"""Cases of the oracle outside as Python wrote them down: tuples, tolerances, and what only looks equal."""

from __future__ import annotations

import pytest

from rl_core.environments.oracle import Case, judge_cases


@pytest.mark.parametrize(
    ("code", "args", "result", "tolerance", "passed"),
    [
        ("def f(a, b): return (a, [b])", "(1, (2, 3))", "(1, [(2, 3)])", 0.0, True),
        ("def f(a): return [a]", "(1,)", "(1,)", 0.0, False),
        ("def f(a): return a / 2", "(4,)", "2", 0.0, True),
        ("def f(a): return a + 1e-9", "(4,)", "4.0", 1e-6, True),
        ("def f(a): return a + 1e-3", "(4,)", "4.0", 1e-6, False),
        ("def f(a): return 'x'", "(4,)", "4.0", 1e-6, False),
        ("def f(d): return {v: k for k, v in d.items()}", "({1: (2, 3)},)", "{(2, 3): 1}", 0.0, True),
        ("def f(): return {'b': 1, 'a': 2}", "()", "{'a': 2, 'b': 1}", 0.0, True),
        ("def f(): return [True, None]", "()", "[1, None]", 0.0, True),
        (
            "class E(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\ndef f(): return E(1)",
            "()",
            "2",
            0.0,
            False,
        ),
        ("import json, os\nos.write(3, b'x')\ndef f(): return 1", "()", "1", 0.0, False),
    ],
)
async def test_cases_written_as_python(sandbox, code, args, result, tolerance, passed):
    case = Case.of_literals(args, result, tolerance=tolerance)
    report = await judge_cases(sandbox, code=code, function="f", cases=[case])
    assert report.passed is passed, report


@pytest.mark.parametrize(("args", "result"), [("(1", "2"), ("1", "2"), ("(f(),)", "2"), ("(1,)", "__import__('os')")])
def test_what_is_no_literal_is_refused(args, result):
    with pytest.raises(ValueError, match=r"not a case|malformed"):
        Case.of_literals(args, result)


async def test_which_cases_pass_is_told_apart(sandbox):
    cases = [Case((n,), n * n) for n in range(4)]
    report = await judge_cases(sandbox, code="def f(n): return n * 2", function="f", cases=cases)
    assert report.correct == (True, False, True, False)
    assert report.first_failure == "f(1) gave 2"
