"""Kinds of mutation: each finds places in a syntax tree and gives one small edit of the text there.

An edit replaces a piece of the source, so that layout and comments stay as they were. What it does is checked by its
caller: the text must parse, and its compiled code must differ.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from rl_core.environments.mutation.sources import parse

_COMPARISONS = {
    ast.Lt: ("<", ">", ">="), ast.LtE: ("<=", ">", ">="), ast.Gt: (">", "<", "<="), ast.GtE: (">=", "<", "<="),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
_BOUNDARIES = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
_OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+", "//"), ast.Div: ("/", "*", "//"),
    ast.FloorDiv: ("//", "/", "%"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"),
}  # fmt: skip
_NEIGHBOURS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "startswith": "endswith", "endswith": "startswith",
    "lstrip": "rstrip", "rstrip": "lstrip", "strip": "lstrip", "find": "rfind", "rfind": "find", "lower": "upper",
    "upper": "lower", "append": "extend", "split": "rsplit", "partition": "rpartition", "rpartition": "partition",
    "ljust": "rjust", "rjust": "ljust", "union": "intersection", "match": "search", "search": "match", "index": "count",
    "popleft": "pop", "items": "keys", "floor": "ceil", "ceil": "floor", "isdigit": "isalpha", "islower": "isupper",
}  # fmt: skip


_SIMPLE = (ast.Name, ast.Call, ast.Attribute)
_LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


class Kind(StrEnum):
    """What was done to the code."""

    COMPARISON = "comparison"  # another comparison
    BOUNDARY = "boundary"  # the bound itself in or out
    OPERATOR = "operator"  # another arithmetic or bit operator
    CONSTANT = "constant"  # a number one off
    TEXT = "text"  # a string emptied or doubled
    BOOLEAN = "boolean"  # and for or, a condition turned round, True for False
    ARGUMENTS = "arguments"  # two arguments swapped, or one left out
    STATEMENT = "statement"  # a statement removed
    NAME = "name"  # another variable of the function
    CALLED = "called"  # a neighbouring function or method
    LOOP = "loop"  # break for continue
    SLICE = "slice"  # a slice without one of its bounds


@dataclass(frozen=True)
class Edit:
    """`old` at `offset` becomes `new`. Offsets are of the text, in characters."""

    kind: Kind
    line: int
    offset: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The text with the edit. Raises: ValueError where the old text is not there."""
        end = self.offset + len(self.old)
        if text[self.offset : end] != self.old:
            raise ValueError(f"the text at {self.offset} is not {self.old!r}")
        return text[: self.offset] + self.new + text[end:]

    def reverse(self) -> Edit:
        """The edit that repairs."""
        return Edit(self.kind, self.line, self.offset, self.new, self.old)


class Text:
    """A source's text and tree, and pieces of the one by nodes of the other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = parse(text)
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def offset(self, line: int, column_bytes: int) -> int:
        """Offset in characters of a place that the tree gives in bytes."""
        prefix = self._lines[line - 1].encode()[:column_bytes]
        return self._starts[line - 1] + len(prefix.decode())

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Where a node begins."""
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Where a node ends."""
        return self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def of(self, node: ast.expr | ast.stmt) -> str:
        """A node's text."""
        return self.text[self.start(node) : self.end(node)]

    def replace(self, kind: Kind, node: ast.expr | ast.stmt, new: str) -> Edit:
        """An edit of the whole node."""
        return Edit(kind, node.lineno, self.start(node), self.of(node), new)

    def between(self, kind: Kind, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Edit]:
        """An edit of the operator between two nodes."""
        start, end = self.end(left), self.start(right)
        pattern = r"\s+".join(map(re.escape, old.split()))
        pattern = rf"\b{pattern}\b" if old[0].isalpha() else pattern
        found = re.search(pattern, self.text[start:end])
        if found:
            yield Edit(kind, left.end_lineno or left.lineno, start + found.start(), found.group(), new)


def edits_of(text: Text) -> list[Edit]:
    """Every edit inside the functions of a text, in order of place; not of documentation, error messages and types."""
    found: dict[tuple[int, str, str], Edit] = {}
    for function in ast.walk(text.tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = _local_names(function)
        inside = [node for statement in function.body for node in _reachable(statement)]
        edits = [edit for node in inside for finder in _FINDERS for edit in finder(text, node, names)]
        for edit in [*_statement(text, function, names), *edits]:
            found.setdefault((edit.offset, edit.old, edit.new), edit)
    return sorted(found.values(), key=lambda edit: (edit.offset, edit.old, edit.new))


def _reachable(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without what no test should depend on."""
    if isinstance(node, _LEFT_ALONE):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _reachable(child)


def _local_names(function: ast.FunctionDef) -> list[str]:
    spec = function.args
    names = {arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)} - {"self", "cls"}
    names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return sorted(names - {"_"})


def _compare(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if not isinstance(node, ast.Compare):
        return
    operands = [node.left, *node.comparators]
    for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
        for kind, table in ((Kind.COMPARISON, _COMPARISONS), (Kind.BOUNDARY, _BOUNDARIES)):
            old, *new = table.get(type(operator), ("",))
            for other in new:
                yield from text.between(kind, left, right, old, other)


def _arithmetic(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            return  # formatting
        old, *new = _OPERATORS.get(type(node.op), ("",))
        for other in new:
            yield from text.between(Kind.OPERATOR, node.left, node.right, old, other)
    elif isinstance(node, ast.AugAssign):
        old, *new = _OPERATORS.get(type(node.op), ("",))
        for other in new:
            yield from text.between(Kind.OPERATOR, node.target, node.value, f"{old}=", f"{other}=")


def _constant(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield text.replace(Kind.BOOLEAN, node, str(not value))
    elif isinstance(value, int) and text.of(node).isdigit():
        for other in {value + 1, max(0, value - 1)} - {value}:
            yield text.replace(Kind.CONSTANT, node, str(other))
    elif isinstance(value, str) and len(value) <= 8 and text.of(node)[0] in "'\"" and "\n" not in text.of(node):
        yield text.replace(Kind.TEXT, node, repr(value * 2 if len(value) == 1 else value[:-1]) if value else repr(" "))


def _boolean(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from text.between(Kind.BOOLEAN, left, right, old, new)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield text.replace(Kind.BOOLEAN, node, text.of(node.operand))
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(node.test, _SIMPLE):
        yield text.replace(Kind.BOOLEAN, node.test, f"not {text.of(node.test)}")


def _arguments(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if not isinstance(node, ast.Call) or any(isinstance(arg, ast.Starred) for arg in node.args):
        return
    for left, right in zip(node.args, node.args[1:], strict=False):
        gap = text.text[text.end(left) : text.start(right)]
        old = text.text[text.start(left) : text.end(right)]
        yield Edit(Kind.ARGUMENTS, left.lineno, text.start(left), old, text.of(right) + gap + text.of(left))
    if len(node.args) > 1 and not node.keywords:
        start = text.end(node.args[-2])
        yield Edit(Kind.ARGUMENTS, node.args[-2].lineno, start, text.text[start : text.end(node.args[-1])], "")


def _statement(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    """Statements of a block with others, each on lines of its own."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        if not isinstance(statements, list) or len(statements) < 2:
            continue
        for statement in statements:
            simple = isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break, ast.Delete))
            if not (simple or isinstance(statement, ast.If)) or _is_text(statement):
                continue
            start, end = text.offset(statement.lineno, 0), text.end(statement)
            if text.text[start : text.start(statement)].strip() or text.text[end : end + 1] != "\n":
                continue
            yield Edit(Kind.STATEMENT, statement.lineno, start, text.text[start : end + 1], "")


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _name(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        at = names.index(node.id)
        for other in {names[at - 1], names[(at + 1) % len(names)]} - {node.id}:
            yield text.replace(Kind.NAME, node, other)


def _called(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    function = node.func
    old = getattr(function, "id", None) or getattr(function, "attr", "")
    if old in _NEIGHBOURS:
        yield Edit(Kind.CALLED, function.end_lineno or 0, text.end(function) - len(old), old, _NEIGHBOURS[old])


def _loop(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if isinstance(node, (ast.Break, ast.Continue)):
        yield text.replace(Kind.LOOP, node, "continue" if isinstance(node, ast.Break) else "break")


def _slice(text: Text, node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield text.replace(Kind.SLICE, bound, "")


_FINDERS: tuple[Callable[[Text, ast.AST, list[str]], Iterator[Edit]], ...] = (
    _compare, _arithmetic, _constant, _boolean, _arguments, _statement, _name, _called, _loop, _slice,
)  # fmt: skip
