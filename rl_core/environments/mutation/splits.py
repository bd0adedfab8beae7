"""Which sources train and which are held out. Sources that share code stay on one side, so that nothing leaks."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence

from blake3 import blake3

from rl_core.environments.mutation.sources import Source, parse
from rl_core.types import Split

_MIN_NODES = 40  # smaller functions are alike by chance
_HELDOUT_EVERY = 5


def split_sources(sources: Sequence[Source], seed: int) -> dict[str, Split]:
    """A split for every source, by its name: about a fifth is held out, at least one where there are two."""
    groups = _groups(sources)
    random.Random(f"{seed}:split").shuffle(groups)
    heldout = {name for group in groups[1::_HELDOUT_EVERY] for name in group}
    return {source.name: Split.HELDOUT if source.name in heldout else Split.TRAIN for source in sources}


def _groups(sources: Sequence[Source]) -> list[list[str]]:
    """Names of sources, those with a function in common together."""
    group_of = {source.name: source.name for source in sources}
    owners: dict[str, str] = {}
    for source in sources:
        for print_ in sorted(function_prints(source)):
            first = owners.setdefault(print_, source.name)
            old, new = group_of[source.name], group_of[first]
            if old != new:
                group_of.update({name: new for name, group in group_of.items() if group == old})
    names = sorted(set(group_of.values()))
    return [[name for name, group in group_of.items() if group == wanted] for wanted in names]


def function_prints(source: Source) -> set[str]:
    """Hashes of the bodies of its longer functions, without layout, comments and documentation."""
    prints = set()
    for path in source.modules.values():
        for node in ast.walk(parse(source.files[path])):
            if not isinstance(node, ast.FunctionDef):
                continue
            body = [statement for statement in node.body if not _is_documentation(statement)]
            if sum(1 for statement in body for _ in ast.walk(statement)) >= _MIN_NODES:
                text = "".join(ast.dump(statement) for statement in body)
                prints.add(blake3(text.encode()).hexdigest())
    return prints


def _is_documentation(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
