"""Tools over a tree: read, list, grep, write, edit, patch. Each is a function of a tree to a text and a tree."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import re2

from rl_core.environments.repository.tree import ToolProblem, Tree, plain, plain_lines
from rl_core.environments.repository.unified_patch import apply_patch

MAX_READ_LINES = 400
MAX_LINE_CHARS = 400
MAX_ENTRIES = 300
MAX_MATCHES = 100
MAX_PATTERN_CHARS = 300
GREP_S = 1.0

FileTool = Callable[[Tree, dict[str, Any]], tuple[str, Tree]]


def read(tree: Tree, arguments: dict[str, Any]) -> tuple[str, Tree]:
    """Lines of a text file, numbered. Raises: ToolProblem."""
    path = plain(arguments["path"])
    lines = plain_lines(tree.text(path))
    first = arguments.get("first_line", 1)
    last = min(arguments.get("last_line", len(lines)), len(lines))
    if first > max(last, 1):
        raise ToolProblem(f"{path} has {len(lines)} lines; there is nothing from {first} to {last}")
    stop = min(last, first + MAX_READ_LINES - 1)
    shown = [f"{number}\t{_short(lines[number - 1])}" for number in range(first, stop + 1)]
    if stop < len(lines):
        shown.append(f"({len(lines) - stop} more lines of {len(lines)})")
    return "\n".join(shown) or f"({path} is empty)", tree


def list_files(tree: Tree, arguments: dict[str, Any]) -> tuple[str, Tree]:
    """Files and folders under a folder, down to a depth; folders that are not opened have their file count."""
    folder = plain(arguments.get("path", ""), folder=True)
    if folder not in tree.folders:
        raise ToolProblem(f"there is no folder {folder}")
    prefix = f"{folder}/" if folder else ""
    depth = arguments.get("depth", 2)
    entries: dict[str, int] = {}
    for path in tree.paths():
        if path.startswith(prefix):
            parts = path[len(prefix) :].split("/")
            name = "/".join(parts[:depth]) + ("/" if len(parts) > depth else "")
            entries[name] = entries.get(name, 0) + 1
    shown = [f"{name} ({count} files)" if name.endswith("/") else name for name, count in entries.items()]
    if len(shown) > MAX_ENTRIES:
        shown = [*shown[:MAX_ENTRIES], f"({len(shown) - MAX_ENTRIES} more entries)"]
    return "\n".join(shown) or "(no files)", tree


def grep(tree: Tree, arguments: dict[str, Any]) -> tuple[str, Tree]:
    """Lines that match a pattern, in all text files under a path. Raises: ToolProblem, also when it takes too long."""
    pattern = _compiled(arguments["pattern"], ignore_case=arguments.get("ignore_case", False))
    under = plain(arguments.get("path", ""), folder=True)
    ends_at = time.monotonic() + GREP_S
    matches: list[str] = []
    for path in tree.paths():
        if under and path != under and not path.startswith(f"{under}/"):
            continue
        try:
            lines = plain_lines(tree.text(path))
        except ToolProblem:  # no text
            continue
        for number, line in enumerate(lines, start=1):
            if time.monotonic() > ends_at:
                raise ToolProblem(f"searching took longer than {GREP_S:g} s; name a path to search under")
            if pattern.search(line):
                matches.append(f"{path}:{number}: {_short(line)}")
                if len(matches) == MAX_MATCHES:
                    return "\n".join([*matches, f"(stopped at {MAX_MATCHES} matches)"]), tree
    return "\n".join(matches) or "(no matches)", tree


def write(tree: Tree, arguments: dict[str, Any]) -> tuple[str, Tree]:
    """Make a file, or replace one whole. Raises: ToolProblem."""
    path = plain(arguments["path"])
    was = tree.exists(path)
    content = _encoded(arguments["content"])
    return f"{'replaced' if was else 'made'} {path}, {len(content)} bytes", tree.written(path, content)


def edit(tree: Tree, arguments: dict[str, Any]) -> tuple[str, Tree]:
    """Replace a text that is in a file exactly once. Raises: ToolProblem."""
    path, old, new = plain(arguments["path"]), arguments["old"], arguments["new"]
    text = tree.text(path)
    if not old:
        raise ToolProblem("old is empty: say which text to replace")
    first = text.find(old)
    if first < 0:
        raise ToolProblem(f"old is not in {path}; read the file again and copy the text exactly")
    if text.find(old, first + 1) >= 0:
        raise ToolProblem(f"old is in {path} more than once; take in more of its surroundings")
    line = text.count("\n", 0, first) + 1
    content = _encoded(text[:first] + new + text[first + len(old) :])
    return f"edited {path} at line {line}", tree.written(path, content)


def patch(tree: Tree, arguments: dict[str, Any]) -> tuple[str, Tree]:
    """Apply a unified diff, whole or not at all. Raises: ToolProblem."""
    _encoded(arguments["patch"])
    tree, changed = apply_patch(tree, arguments["patch"])
    return f"patched {', '.join(changed)}", tree


def _short(line: str) -> str:
    if len(line) <= MAX_LINE_CHARS:
        return line
    return f"{line[:MAX_LINE_CHARS]} … ({len(line) - MAX_LINE_CHARS} more characters)"


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ToolProblem("the text has half a surrogate pair in it, which no file can hold") from None


def _compiled(pattern: str, *, ignore_case: bool) -> Any:
    """RE2: time linear in the text and bounded memory, where other engines can be made to take either without end."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ToolProblem(f"a pattern may have {MAX_PATTERN_CHARS} characters")
    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args else "no reason given"
        raise ToolProblem(f"the pattern does not compile: {reason}") from None
    except UnicodeError:
        raise ToolProblem("the pattern has half a surrogate pair in it") from None
