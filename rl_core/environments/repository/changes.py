"""What a tree changed, as a unified diff for people: bounded, whatever was written."""

from __future__ import annotations

import difflib

from rl_core.environments.repository.tree import Tree, ended_lines

MAX_DIFFED_LINES = 2000
MAX_DIFF_CHARS = 100_000


def unified_diff(tree: Tree) -> str:
    """The layer against its base. Files that are long or no text are named with their sizes instead."""
    parts: list[str] = []
    for path in sorted(tree.layer):
        parts.append(_file_diff(path, tree.base.get(path), tree.layer[path]))
        if sum(map(len, parts)) > MAX_DIFF_CHARS:
            return f"{''.join(parts)[:MAX_DIFF_CHARS]}\n(cut)\n"
    return "".join(parts)


def _file_diff(path: str, before: bytes | None, after: bytes | None) -> str:
    names = (f"a/{path}" if before is not None else "/dev/null", f"b/{path}" if after is not None else "/dev/null")
    try:
        lines = [ended_lines((content or b"").decode()) for content in (before, after)]
    except UnicodeDecodeError:
        return f"--- {names[0]}\n+++ {names[1]}\n(not text: {len(before or b'')} → {len(after or b'')} bytes)\n"
    if max(map(len, lines)) > MAX_DIFFED_LINES:
        return f"--- {names[0]}\n+++ {names[1]}\n(long: {len(lines[0])} → {len(lines[1])} lines)\n"
    marked = [[_marked(line) for line in side] for side in lines]
    return "".join(difflib.unified_diff(marked[0], marked[1], names[0], names[1]))


def _marked(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
