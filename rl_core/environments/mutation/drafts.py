"""From a mutant to a task: which tests are shown and which are hidden, the test file, the difficulty."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from rl_core.environments.mutation.calls import Test, show, tags
from rl_core.environments.mutation.screening import Mutant
from rl_core.environments.mutation.sources import Source, parse
from rl_core.environments.tasks import Task
from rl_core.types import Split

TEST_FILE = "test_visible.py"
_HIDDEN_FAILING, _HIDDEN_PASSING = 8, 8
_SUBTLE_SHARE, _LONG_LINES = 0.35, 400
LEVELS = ("easy", "medium", "hard")


@dataclass(frozen=True)
class Draft:
    """A task that is not yet proven: `files` are what the mutation changed, with the test file."""

    source: Source
    path: str
    files: dict[str, str]
    visible: Test
    hidden: tuple[Test, ...]
    about: dict[str, Any]

    @property
    def level(self) -> str:
        """How hard the repair is thought to be."""
        return str(self.about["difficulty"]["level"])

    @property
    def id(self) -> str:
        """Equal for equal repositories."""
        digest = blake3(f"{self.path}\0{self.files[self.path]}".encode()).hexdigest()[:12]
        return f"mutation:{self.source.name.replace('_', '-')}:{digest}"

    def task(self, split: Split) -> Task:
        """The task: the repository with the failing test for the policy, everything else for graders."""
        files = {**self.source.files, **self.files}
        return Task(
            id=self.id,
            split=split,
            input={
                "instruction": f"One change broke this repository: `python {TEST_FILE}` fails. Repair the code so that "
                "it does what its documentation says; other tests, which you do not see, must pass too.",
                "files": files,
                "test": TEST_FILE,
            },
            reference={
                "visible": msgspec.to_builtins(self.visible),
                "hidden": [msgspec.to_builtins(test) for test in self.hidden],
                "blocked": list(self.source.blocked),
                **self.about,
            },
        )


def draft(mutant: Mutant) -> Draft:
    """Choose the tests: the plainest failing one is shown; more failing ones, and some that pass, are hidden."""
    probed, source = mutant.probed, mutant.probed.source
    failing = sorted(mutant.failing, key=lambda number: _plainness(probed.tests[number]))
    visible = probed.tests[failing[0]]
    hidden = [
        probed.tests[n] for n in _spread(failing[1:], _HIDDEN_FAILING) + _spread(list(mutant.passing), _HIDDEN_PASSING)
    ]
    share = len(failing) / (len(failing) + len(mutant.passing))
    function = _enclosing(source.files[mutant.path], mutant.edit.line)
    lines = source.files[mutant.path].count("\n")
    points = (share < _SUBTLE_SHARE) + (function != visible.call.name) + (lines > _LONG_LINES)
    before, after = source.files[mutant.path], mutant.text
    repair = mutant.edit.reverse()
    about = {
        "source": source.name,
        "origin": source.origin,
        "licence": source.licence,
        "file": mutant.path,
        "function": function,
        "mutation": mutant.edit.kind.value,
        "line": mutant.edit.line,
        "solution": {"file": mutant.path, "offset": repair.offset, "old": repair.old, "new": repair.new},
        "diff": "".join(_diff(after, before, mutant.path)),
        "difficulty": {
            "level": LEVELS[min(points, 2)],
            "failing_share": round(share, 3),
            "indirect": function != visible.call.name,
            "lines": lines,
        },
    }
    files = {mutant.path: after, TEST_FILE: write_test(visible, source)}
    return Draft(source, mutant.path, files, visible, tuple(hidden), about)


def _spread(numbers: list[int], count: int) -> list[int]:
    """At most `count` of them, evenly over the list."""
    return numbers if len(numbers) <= count else [numbers[i * len(numbers) // count] for i in range(count)]


def _plainness(test: Test) -> tuple[bool, bool, int, str]:
    text = test.call.text()
    odd = sum(tree is None or isinstance(tree, bool) for tree in test.call.args)
    return "raises" in test.expected, "after" in test.expected, 40 * odd + len(text) + len(str(test.expected)), text


def _enclosing(text: str, line: int) -> str:
    """The innermost function around a line."""
    around = [
        node
        for node in ast.walk(parse(text))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno).name if around else ""


def _diff(before: str, after: str, path: str) -> list[str]:
    return list(difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}", n=1))


def write_test(test: Test, source: Source) -> str:
    """A file that `python FILE` runs in the repository: silent when it passes, an exception when it does not."""
    call = test.call
    lines = []
    if source.blocked and any(_imports(text, source.blocked) for text in source.files.values()):
        lines += ["import sys", ""]
        used = [name for name in source.blocked if any(_imports(text, (name,)) for text in source.files.values())]
        lines += [f'sys.modules["{name}"] = None  # the Python code is tested, not its twin in C' for name in used] + [
            ""
        ]
    lines += [f"from {call.module} import {', '.join(call.names())}", "", "", f"def test_{call.name.strip('_')}():"]
    lines += [f"    {line}" for line in _body(test)]
    lines += ["", "", 'if __name__ == "__main__":', f"    test_{call.name.strip('_')}()", ""]
    return "\n".join(lines)


def _body(test: Test) -> list[str]:
    call, expected = test.call, test.expected
    if "raises" in expected:
        return [
            "try:",
            f"    {call.text()}",
            "except Exception as error:",
            f"    assert type(error).__name__ == {expected['raises']!r}, repr(error)",
            "else:",
            f'    raise AssertionError("{expected["raises"]} was not raised")',
        ]
    if "after" in expected:
        names = [f"argument_{number}" for number in range(len(call.args))]
        lines = [f"{name} = {show(arg)}" for name, arg in zip(names, call.args, strict=True)]
        words = names + [f"{name}={show(tree)}" for name, tree in call.kwargs.items()]
        owner = "" if call.owner is None else f"{show(call.owner)}."
        lines.append(f"result = {owner}{call.name}({', '.join(words)})")
        lines.append(_comparison("result", expected["value"]))
        changed = [(n, tree) for n, tree in zip(names, expected["after"], strict=True) if tree is not None]
        return lines + [_comparison(name, tree) for name, tree in changed]
    return [f"result = {call.text()}", _comparison("result", expected["value"])]


def _comparison(name: str, tree: Any) -> str:
    found = tags(tree)
    if isinstance(tree, list) and tree[0] == "iterator":
        name = f"list({name})"
    if "shown" in found or "nan" in found:
        return f"assert repr({name}) == {show(tree)!r}, repr({name})"
    if tree is None or isinstance(tree, bool):
        return f"assert {name} is {tree}, repr({name})"
    return f"assert {name} == {show(tree)}, repr({name})"


def _imports(text: str, names: tuple[str, ...]) -> bool:
    return any(f"from {name} import" in text or f"import {name}" in text for name in names)
