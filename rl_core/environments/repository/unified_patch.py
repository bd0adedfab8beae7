"""Unified diffs as models write them, applied to a tree whole or not at all.

Line numbers and counts in headers are hints only, because models count badly; the text must match exactly, in one
place: where the header says, or else in the only place there is. File names may carry git's `a/` and `b/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rl_core.environments.repository.tree import ToolProblem, Tree, ended_lines, plain

MAX_HUNKS = 200
MAX_PLACES = 9  # that are counted, of those where a hunk would apply
_NOWHERE = "/dev/null"
_HUNK = re.compile(r"@@ -(\d{1,9})(?:,\d{1,9})? \+\d{1,9}(?:,\d{1,9})? @@")
_UNSUPPORTED = ("rename from ", "rename to ", "copy from ", "copy to ", "Binary files ", "GIT binary patch")
_NO_NEWLINE = "\\"


@dataclass(slots=True)
class Hunk:
    """Lines to find, from about `line` on (counted from 1), and those to put in their place; with their ends."""

    line: int
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FilePatch:
    """The hunks of one file; an empty name stands for /dev/null."""

    old: str
    new: str
    hunks: list[Hunk] = field(default_factory=list)


def apply_patch(tree: Tree, patch: str) -> tuple[Tree, list[str]]:
    """The tree with the patch applied, and the files that changed. Raises: ToolProblem; nothing is applied then."""
    changed = []
    for one in parse_patch(patch):
        name = one.new or one.old
        if not name:
            raise ToolProblem("a patch must name a file before or after")
        if one.old and one.new and one.old != one.new:
            raise ToolProblem(
                f"the patch renames {one.old} to {one.new}; write the new one, delete the old one with +++ /dev/null"
            )
        if not one.old and tree.exists(name):
            raise ToolProblem(f"the patch makes {name}, which is there already")
        text = _patched(tree.text(name) if one.old else "", one)
        if one.new:
            tree = tree.written(name, text.encode())
        elif text:
            raise ToolProblem(f"the patch deletes {name} but leaves {len(text)} characters of it")
        else:
            tree = tree.deleted(name)
        changed.append(name)
    return tree, changed


def parse_patch(patch: str) -> list[FilePatch]:
    """The files of a patch. Raises: ToolProblem."""
    files: list[FilePatch] = []
    lines = ended_lines(patch)
    at = hunks = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            files.append(FilePatch(_name(line, "a/"), _name(lines[at + 1], "b/")))
            at += 2
        elif header := _HUNK.match(line):
            if not files:
                raise ToolProblem("the patch names no file: begin with --- a/PATH and +++ b/PATH")
            hunks += 1
            if hunks > MAX_HUNKS:
                raise ToolProblem(f"the patch has more than {MAX_HUNKS} hunks")
            at = _read_hunk(lines, at + 1, hunk := Hunk(int(header[1])))
            files[-1].hunks.append(hunk)
        elif line.startswith(_UNSUPPORTED):
            raise ToolProblem(f"patches here cannot do {line.strip()[:40]!r}")
        else:
            at += 1
    if not files or not all(one.hunks for one in files):
        raise ToolProblem("the patch has no hunks: write --- a/PATH, +++ b/PATH, @@ -1,2 +1,2 @@ and lines")
    return files


def _name(line: str, prefix: str) -> str:
    name = line[4:].split("\t")[0].strip()
    return "" if name == _NOWHERE else plain(name.removeprefix(prefix))


def _read_hunk(lines: list[str], at: int, hunk: Hunk) -> int:
    """Read the hunk's lines; the number of the line after them."""
    sides = [hunk.before, hunk.after]
    while at < len(lines):
        line = lines[at]
        if line.startswith(_NO_NEWLINE):
            if hunk.after in sides and hunk.after:
                hunk.after[-1] = hunk.after[-1].removesuffix("\n")
        elif line.startswith(("--- ", "diff ", "@@ ")) and not _continues(lines, at):
            break
        elif line[:1] in " +-\n\r":
            # An empty line is a line of context whose space was lost.
            body = line[1:] if line[:1] in " +-" else line
            sides = {"-": [hunk.before], "+": [hunk.after]}.get(line[:1], [hunk.before, hunk.after])
            for side in sides:
                side.append(body if body.endswith("\n") else body + "\n")
        else:
            break
        at += 1
    return at


def _continues(lines: list[str], at: int) -> bool:
    """Whether a line that looks like a header is a removed line that begins with two hyphens."""
    is_removed = lines[at].startswith("--- ")
    return is_removed and not (at + 1 < len(lines) and lines[at + 1].startswith("+++ "))


def _patched(text: str, patch: FilePatch) -> str:
    lines = ended_lines(text)
    last = "" if text.endswith("\n") or not lines else lines.pop()
    # A file without a line feed at its end is patched as if it had one: models seldom write the marker for it.
    lines += [f"{last}\n"] if last else []
    shift = 0
    for number, hunk in enumerate(patch.hunks, start=1):
        at = _place(lines, hunk, shift, f"hunk {number} of {patch.new or patch.old}")
        lines[at : at + len(hunk.before)] = hunk.after
        shift += len(hunk.after) - len(hunk.before)
    patched = "".join(lines)
    ends_bare = bool(last) and patched.endswith(f"\n{last}\n")
    return patched.removesuffix("\n") if ends_bare else patched


def _place(lines: list[str], hunk: Hunk, shift: int, which: str) -> int:
    """Where the hunk applies: where it says, or in the one other place that matches. Raises: ToolProblem."""
    before, size = hunk.before, len(hunk.before)
    stated = max(0, hunk.line - 1 + shift)
    if not before:
        if lines and hunk.line:
            raise ToolProblem(f"{which} has no line of context to find its place by")
        return 0
    if lines[stated : stated + size] == before:
        return stated
    # As text, whose search takes linear time: lists of equal lines would be compared for minutes.
    text, wanted = "\n" + "".join(lines), "\n" + "".join(before)
    places: list[int] = []
    while len(places) <= MAX_PLACES and (found := text.find(wanted, places[-1] + 1 if places else 0)) >= 0:
        places.append(found)
    if len(places) != 1:
        count = f"more than {MAX_PLACES}" if len(places) > MAX_PLACES else str(len(places))
        where = "nowhere" if not places else f"in {count} places, none of them line {hunk.line}"
        raise ToolProblem(f"{which} matches {where}; read the file again and copy its lines exactly")
    return text.count("\n", 1, places[0] + 1)
