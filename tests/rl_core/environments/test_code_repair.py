"""Code repair: the bugs are bugs, the solutions are solutions, and cheating earns nothing."""

import asyncio

import pytest

from rl_core.environments import code_repair
from rl_core.environments.bugs import HELDOUT_BUGS, TRAIN_BUGS
from rl_core.environments.candidates import run_candidate
from rl_core.environments.criteria import defined_functions
from rl_core.environments.oracle import MAX_CODE_CHARS, Case, judge_cases
from rl_core.errors import WorldError
from rl_core.sandbox.protocol import Outcome, RunResult
from rl_core.types import Split
from tests.rl_core.environments.cheats import CHEATS

CASES = [Case((2,), 4), Case((0,), 0), Case((-3,), -6)]


def test_enough_bugs_and_no_function_on_both_sides():
    assert len(TRAIN_BUGS) >= 24
    assert len(HELDOUT_BUGS) >= 12
    assert not {bug.name for bug in TRAIN_BUGS} & {bug.name for bug in HELDOUT_BUGS}


def run_here(code, name, args):
    """The catalogue is ours: it may run here, where it is quick."""
    space = {}
    exec(code, space)
    return space[name](*args)


@pytest.mark.parametrize("task", code_repair.build_task_set().tasks, ids=lambda task: task.id)
def test_every_bug_fails_visibly_and_every_solution_passes(task):
    name, visible = task.reference["function"], task.reference["visible"]
    cases = [visible, *task.reference["hidden"]]
    assert defined_functions(task.input["code"]) == {name}
    for case in cases:
        given = run_here(task.reference["solution"], name, case["args"])
        assert (given, type(given)) == (case["result"], type(case["result"]))
    try:
        wrong = run_here(task.input["code"], name, visible["args"])
    except TypeError:
        return
    assert wrong != visible["result"]


async def test_the_tool_says_pass_or_what_it_got(sandbox):
    task = next(t for t in code_repair.build_task_set().split(Split.HELDOUT) if t.reference["function"] == "double")
    answers = {
        "def double(x): return x * 2": "PASS",
        "def double(x): return x * 3": "double(5) gave 15",
        "def double(x): return y": "NameError: name 'y' is not defined",
        "def twice(x): return x * 2": "NameError: double is not defined",
        "def double(x) return": "SyntaxError: expected ':' (candidate.py, line 1)",
        "while True: pass": "TimeoutError: the code ran too long",
        "import os; os._exit(0)": "the process ended early",
        "x" * (MAX_CODE_CHARS + 1): f"code longer than {MAX_CODE_CHARS} characters",
    }
    results = await asyncio.gather(*(run_candidate(sandbox, task, {"code": code}) for code in answers))
    assert [r.text for r in results] == list(answers.values())
    assert [r.ok for r in results] == [r.solved for r in results] == [True] + [False] * 7
    assert results[1].artifacts == {"candidate": "def double(x): return x * 3"}


@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_earns_nothing(sandbox, name):
    report = await judge_cases(sandbox, code=CHEATS[name], function="f", cases=CASES)
    assert not report.passed
    assert 0 < len(report.first_failure) <= 160
    assert report.first_failure.isprintable()


@pytest.mark.parametrize(
    "code",
    ["def f(x): return x * 2", "f = lambda x: x + x", "def f(x):\n    print('noise')\n    return x << 1"],
)
async def test_honest_solutions_pass(sandbox, code):
    assert (await judge_cases(sandbox, code=code, function="f", cases=CASES)).passed


class Answering:
    """A sandbox that answers with fixed output."""

    def __init__(self, stdout, outcome=Outcome.OK):
        self.result = RunResult(outcome=outcome, exit_code=0, stdout=stdout, stderr=b"", wall_s=0.1)

    async def run(self, *args, **kwargs):
        return self.result


@pytest.mark.parametrize(
    "stdout",
    [b"", b"null", b"7", b"{}", b"[1]", b'[{"id": []}]', b'[{"value": 1}]', b"[" * 10**5, b'[{"id": NaN}]', b"\xff"],
)
async def test_answers_that_are_none_fail_the_candidate(stdout):
    report = await judge_cases(Answering(stdout), code="", function="f", cases=CASES)
    assert (report.passed, report.first_failure) == (False, "the process ended early")


async def test_an_expected_value_that_is_not_json_is_our_fault():
    class Honest(Answering):
        async def run(self, *args, stdin, **kwargs):
            import json

            ids = [case["id"] for case in json.loads(stdin)["cases"]]
            stdout = json.dumps([{"id": i, "value": 1, "shown": "1"} for i in ids]).encode()
            return RunResult(outcome=Outcome.OK, exit_code=0, stdout=stdout, stderr=b"", wall_s=0.1)

    with pytest.raises(WorldError, match="not JSON"):
        await judge_cases(Honest(b""), code="", function="f", cases=[Case((1,), {1, 2})])
