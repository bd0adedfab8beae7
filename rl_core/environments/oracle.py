"""The oracle outside: tests of model-written code whose answers never enter the sandbox.

The child gets a candidate, inputs and unguessable ids. It answers with values; the parent compares them with answers
it kept, rebuilt strictly from JSON, so that an object equal to everything, an `int` subclass, a patched `json`, an
early exit or spoofed output can at most fail. Every id must come back exactly once.
"""

from __future__ import annotations

import ast
import json
import secrets
from typing import Any

import msgspec

from rl_core.errors import WorldError
from rl_core.sandbox.protocol import Outcome, RunLimits, RunResult, Sandbox

MAX_CODE_CHARS = 8000
# One lean Python process. Its tmpfs holds nothing: the candidate has no files to write.
ORACLE_LIMITS = RunLimits(wall_s=4.0, cpu_s=2, pids=8, disk_bytes=256 * 1024, output_bytes=32 * 1024)

# Runs inside. The channel is a private copy of stdout, so that a candidate's prints do not mix with answers; whatever
# it does to this process, it can only answer with values, and the values are what is judged.
_CHILD = """
import json, os, sys
job = json.loads(sys.stdin.buffer.read())
channel = os.dup(1)
os.dup2(2, 1)

def build(tree):
    if type(tree) is not list:
        return tree
    kind, items = tree
    if kind == "dict":
        return {build(k): build(v) for k, v in items}
    return {"list": list, "tuple": tuple}[kind](map(build, items))

def plain(value, depth=0):
    kind = type(value)
    if depth > 20:
        raise ValueError("nested too deep")
    if kind in (int, float, str, bool, type(None)):
        return value
    if kind in (list, tuple):
        return [["list", "tuple"][kind is tuple], [plain(item, depth + 1) for item in value]]
    if kind is dict:
        return ["dict", [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in value.items()]]
    raise TypeError("returned a " + kind.__name__)

def describe(error):
    return type(error).__name__ + ": " + str(error)

answers = []
try:
    space = {"__name__": "candidate"}
    exec(compile(job["code"], "candidate.py", "exec"), space)
    function = space[job["function"]]
except BaseException as error:
    name = "NameError: " + job["function"] + " is not defined"
    failure = name if isinstance(error, KeyError) else describe(error)
    answers = [{"id": case["id"], "error": failure[:200]} for case in job["cases"]]
else:
    for case in job["cases"]:
        try:
            value = function(*map(build, case["args"]))
            answers.append({"id": case["id"], "value": plain(value), "shown": repr(value)[:200]})
        except BaseException as error:
            answers.append({"id": case["id"], "error": describe(error)[:200]})
os.write(channel, json.dumps(answers).encode())
"""


class Case(msgspec.Struct, frozen=True):
    """One test: arguments and the result that only the parent knows, both of plain values (JSON's, and tuples).

    A `strict` result must be equal in value and in type: 1 is neither True nor 1.0. Else it is what Python takes as
    equal, or a number within `tolerance`.
    """

    args: tuple[Any, ...]
    result: Any
    strict: bool = True
    tolerance: float = 0.0

    @classmethod
    def of_literals(cls, args: str, result: str, *, tolerance: float = 0.0) -> Case:
        """A case as Python wrote it down: `(1, [2])` and `3`. Raises: ValueError."""
        try:
            return cls(tuple(ast.literal_eval(args)), ast.literal_eval(result), strict=False, tolerance=tolerance)
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(f"not a case: {error}") from error


class Report(msgspec.Struct, frozen=True):
    """Which cases passed, in their order; what the first failing one gave, bounded, safe to show."""

    correct: tuple[bool, ...]
    first_failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(self.correct)


async def judge_cases(
    sandbox: Sandbox, *, code: str, function: str, cases: list[Case], limits: RunLimits = ORACLE_LIMITS
) -> Report:
    """Run a candidate on every case in one fresh sandbox and judge its answers outside.

    Raises: WorldError when the sandbox failed; whatever the candidate did is a report.
    """
    none = (False,) * len(cases)
    if len(code) > MAX_CODE_CHARS:
        return Report(none, f"code longer than {MAX_CODE_CHARS} characters")
    ids = [secrets.token_hex(8) for _ in cases]
    # Shuffled by their random ids: a candidate cannot know a case by its place either.
    order = sorted(range(len(cases)), key=ids.__getitem__)
    job = {
        "code": code,
        "function": function,
        "cases": [{"id": ids[i], "args": [_tagged(arg) for arg in cases[i].args]} for i in order],
    }
    result = await sandbox.run(code=_CHILD, stdin=json.dumps(job).encode(), limits=limits)
    answers = _answers(result, set(ids))
    if isinstance(answers, str):
        return Report(none, answers)
    failures = [_compare(function, case, answers[case_id]) for case, case_id in zip(cases, ids, strict=True)]
    return Report(tuple(not failure for failure in failures), next(filter(None, failures), ""))


def _answers(result: RunResult, ids: set[str]) -> dict[str, dict[str, Any]] | str:
    """The child's answers by id, or why there are none that count."""
    if result.outcome is not Outcome.OK:
        return {
            Outcome.TIMEOUT: "TimeoutError: the code ran too long",
            Outcome.MEMORY: "MemoryError: the code used too much memory",
            Outcome.OUTPUT_LIMIT: "the code wrote too much output",
        }.get(result.outcome, "the process was killed")
    try:
        answers = json.loads(result.stdout, parse_constant=_refuse_constant)
        by_id = {answer["id"]: answer for answer in answers}
    except (ValueError, TypeError, KeyError, RecursionError):
        return "the process ended early"
    if len(answers) != len(ids) or set(by_id) != ids:
        return "the process ended early"
    return by_id


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _compare(function: str, case: Case, answer: dict[str, Any]) -> str:
    """Empty when the answer is the expected value, else what was given. Raises: WorldError."""
    shown_args = ", ".join(repr(arg) for arg in case.args)
    error = answer.get("error")
    if error is not None:
        return _one_line(error)
    if "value" not in answer:
        return "the process ended early"
    if _right(answer["value"], case):
        return ""
    return _one_line(f"{function}({shown_args}) gave {answer.get('shown')}")


def _right(given: Any, case: Case) -> bool:
    if case.strict:
        return _same(given, _tagged(case.result))
    try:
        value = _built(given)
        near = isinstance(value, (int, float)) and abs(value - case.result) <= case.tolerance
        return bool(value == case.result) or (case.tolerance > 0 and near)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
        return False


def _built(tree: Any) -> Any:
    """A value from the child's notation. Raises: ValueError, TypeError, KeyError for what is none."""
    if not isinstance(tree, list):
        return tree
    kind, items = tree
    if kind == "dict":
        return {_built(key): _built(value) for key, value in items}
    return {"list": list, "tuple": tuple}[kind](_built(item) for item in items)


def _tagged(value: Any) -> Any:
    """A value in the child's notation. Raises: WorldError for what a task set cannot hold."""
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_tagged(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[_tagged(key), _tagged(item)] for key, item in value.items()]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise WorldError(f"a value of type {type(value).__name__} is not JSON, nor a tuple")


def _same(given: Any, expected: Any) -> bool:
    """Equal in value and in type: True is not 1, 1 is not 1.0."""
    if type(given) is not type(expected):
        return False
    if isinstance(given, list):
        return len(given) == len(expected) and all(_same(a, b) for a, b in zip(given, expected, strict=True))
    return bool(given == expected)


def _one_line(text: Any) -> str:
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "?" for c in line)[:160]
