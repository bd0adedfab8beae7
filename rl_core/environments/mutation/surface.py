"""What of a source can be called: public functions and methods with their parameters, read from the syntax tree."""

from __future__ import annotations

import ast
import doctest
from collections.abc import Iterator
from dataclasses import dataclass

from rl_core.environments.mutation.calls import Call, Tree, tree_of
from rl_core.environments.mutation.sources import Source, parse

_CALLED_DUNDERS = frozenset(
    f"__{name}__"
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs", "and", "or", "xor", "round", "eq", "lt",
        "le", "gt", "ge", "contains", "len", "getitem", "str", "repr", "iter", "call",
    )
)  # fmt: skip
# These act on the process, the terminal or a file, whatever module they are in.
_NEVER = frozenset(
    ("main", "exit", "error", "print_help", "print_usage", "print_version", "interact", "test", "open", "read", "write")
)


@dataclass(frozen=True)
class Parameter:
    """A parameter: its name, what its annotation says, and its default as written."""

    name: str
    annotation: str
    default: str | None
    keyword_only: bool


@dataclass(frozen=True)
class Callable:
    """A public function, or a method of a public class (`owner`); a class itself has the name `__init__`."""

    module: str
    owner: str | None
    name: str
    parameters: tuple[Parameter, ...]
    variadic: bool

    @property
    def label(self) -> str:
        """Module, class and name."""
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


@dataclass(frozen=True)
class Surface:
    """All that can be called, and what the module's own examples and constants give as inputs."""

    callables: list[Callable]
    examples: list[Call]
    strings: list[str]
    numbers: list[int]


def read_surface(source: Source) -> Surface:
    """The surface of every module of a source."""
    callables: list[Callable] = []
    examples: list[Call] = []
    strings: set[str] = set()
    numbers: set[int] = set()
    for module, path in source.modules.items():
        tree = parse(source.files[path])
        found = list(_callables(module, tree))
        callables += found
        examples += _examples(module, tree, found)
        strings |= _strings(tree)
        numbers |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is int}
    strings |= {tree for call in examples for tree in call.args if isinstance(tree, str)}
    return Surface(callables, examples, sorted(strings), sorted(n for n in numbers if abs(n) <= 1000))


def _callables(module: str, tree: ast.Module) -> Iterator[Callable]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _public(node.name):
            yield _callable(module, None, node, skip=0)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _methods(module, node)


def _methods(module: str, node: ast.ClassDef) -> Iterator[Callable]:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    maker = methods.get("__init__") or methods.get("__new__")
    yield _callable(module, node.name, maker, skip=1) if maker else Callable(module, node.name, "__init__", (), False)
    for name, item in methods.items():
        decorators = {ast.unparse(d) for d in item.decorator_list}
        if not (_public(name) or name in _CALLED_DUNDERS) or any("property" in d or "setter" in d for d in decorators):
            continue
        yield _callable(module, node.name, item, skip=0 if "staticmethod" in decorators else 1)
    assigned = (n for item in node.body if isinstance(item, ast.Assign) for t in item.targets for n in ast.walk(t))
    for name in sorted({n.id for n in assigned if isinstance(n, ast.Name)} & _CALLED_DUNDERS):
        yield Callable(module, node.name, name, (Parameter("b", "", None, False),), False)


def _public(name: str) -> bool:
    return not name.startswith("_") and name not in _NEVER


def _callable(module: str, owner: str | None, node: ast.FunctionDef, *, skip: int) -> Callable:
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + [ast.unparse(d) for d in spec.defaults]
    parameters = [_parameter(arg, default, False) for arg, default in zip(positional, defaults, strict=True)][skip:]
    named = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    parameters += [_parameter(arg, ast.unparse(d) if d else None, True) for arg, d in named]
    name = "__init__" if node.name == "__new__" else node.name
    return Callable(module, owner, name, tuple(parameters), spec.vararg is not None)


def _parameter(arg: ast.arg, default: str | None, keyword_only: bool) -> Parameter:
    return Parameter(arg.arg, ast.unparse(arg.annotation) if arg.annotation else "", default, keyword_only)


def _strings(tree: ast.Module) -> set[str]:
    """Short strings of the code, without documentation."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in documentation)
    return {n.value for n in constants if isinstance(n.value, str) and 0 < len(n.value) <= 40 and n.value.isprintable()}


def _examples(module: str, tree: ast.Module, callables: list[Callable]) -> list[Call]:
    """Calls with literal arguments in the documentation's examples."""
    names = {(c.owner, c.name) for c in callables}
    nodes = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    found: list[Call] = []
    for text in filter(None, (ast.get_docstring(node) for node in nodes)):
        try:
            lines = [example.source for example in doctest.DocTestParser().get_examples(text)]
        except ValueError:
            continue
        for line in lines:
            found += _literal_calls(module, line, names)
    return found


def _literal_calls(module: str, line: str, names: set[tuple[str | None, str]]) -> Iterator[Call]:
    try:
        tree = parse(line)
    except SyntaxError:
        return
    classes = {owner for owner, _ in names if owner}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function, owner = node.func, None
        try:
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
                owner = _new(function.value, classes)
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            key = (owner[1] if owner else None, name)
            if key in names:
                args = [_argument(arg, classes) for arg in node.args]
                kwargs = {k.arg: _argument(k.value, classes) for k in node.keywords if k.arg}
                yield Call(module=module, name=name, args=args, kwargs=kwargs, owner=owner)
        except (ValueError, TypeError):
            continue


def _argument(node: ast.expr, classes: set[str]) -> Tree:
    return _new(node, classes) if isinstance(node, ast.Call) else tree_of(ast.literal_eval(node))


def _new(node: ast.Call, classes: set[str]) -> Tree:
    """An object made in an example. Raises: ValueError."""
    name = ast.unparse(node.func).split(".")[-1]
    if name not in classes or node.keywords:
        raise ValueError(name)
    return ["new", name, [tree_of(ast.literal_eval(arg)) for arg in node.args]]
