"""A repository as a value: a base tree that never changes, and the layer of what differs from it.

File tools act on this in memory, never through a file system, so there is no path out of it and no link to follow.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from rl_core.sandbox.protocol import MIB, Layer
from rl_core.sandbox.trees import plain_path

MAX_FILE_BYTES = 1 * MIB
MAX_LAYER_BYTES = 6 * MIB
MAX_LAYER_FILES = 512


class ToolProblem(Exception):
    """A tool cannot do what the policy asked for. The message is shown to it."""


@dataclass(frozen=True)
class Tree:
    """A base with a layer over it. Every change makes a new tree."""

    base: Mapping[str, bytes]
    layer: Layer

    def read(self, path: str) -> bytes:
        """A file's content. Raises: ToolProblem."""
        content = self.layer[path] if path in self.layer else self.base.get(path)
        if content is not None:
            return content
        if path in self.folders:
            raise ToolProblem(f"{path} is a folder")
        raise ToolProblem(f"there is no file {path}")

    def text(self, path: str) -> str:
        """A text file's content. Raises: ToolProblem for what is no UTF-8 text, too."""
        content = self.read(path)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise ToolProblem(f"{path} is not a text file ({len(content)} bytes)") from None
        if "\0" in text:
            raise ToolProblem(f"{path} is not a text file ({len(content)} bytes)")
        return text

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return self.layer[path] is not None if path in self.layer else path in self.base

    def paths(self) -> Iterator[str]:
        """Every file, in the order of names."""
        return iter(self._paths)

    @cached_property
    def _paths(self) -> list[str]:
        return sorted(path for path in {*self.base, *self.layer} if self.exists(path))

    @cached_property
    def folders(self) -> frozenset[str]:
        """Every folder that holds a file, the root ("") too."""
        found = {""}
        for path in self._paths:
            while (path := posixpath.dirname(path)) not in found:
                found.add(path)
        return frozenset(found)

    def written(self, path: str, content: bytes) -> Tree:
        """The tree with a file's new content. Raises: ToolProblem for a path or a size that cannot be."""
        if len(content) > MAX_FILE_BYTES:
            raise ToolProblem(f"{path} would have {len(content)} bytes; a file may have {MAX_FILE_BYTES}")
        if path in self.folders:
            raise ToolProblem(f"{path} is a folder")
        above = posixpath.dirname(path)
        while above:
            if self.exists(above):
                raise ToolProblem(f"{above} is a file, so it cannot hold {path}")
            above = posixpath.dirname(above)
        if self.base.get(path) == content:
            return Tree(self.base, {other: was for other, was in self.layer.items() if other != path})
        return self._layered({**self.layer, path: content})

    def deleted(self, path: str) -> Tree:
        """The tree without a file. Raises: ToolProblem when there is none."""
        self.read(path)
        if path in self.base:
            return self._layered({**self.layer, path: None})
        return Tree(self.base, {other: content for other, content in self.layer.items() if other != path})

    def _layered(self, layer: Layer) -> Tree:
        if len(layer) > MAX_LAYER_FILES:
            raise ToolProblem(f"more than {MAX_LAYER_FILES} files changed")
        if sum(len(content) for content in layer.values() if content) > MAX_LAYER_BYTES:
            raise ToolProblem(f"the changed files would have more than {MAX_LAYER_BYTES} bytes together")
        return Tree(self.base, layer)


def plain(path: str, *, folder: bool = False) -> str:
    """A path as the tree names it; the root, "" or ".", only for a `folder`. Raises: ToolProblem.

    Nothing is resolved: an absolute path, one with `..` or an odd character in it is refused, not repaired.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    name = "/".join(parts)
    if path.startswith("/") or (name and not plain_path(name)):
        raise ToolProblem(f"{path[:80]!r} is no path here: paths are relative to the repository, without ..")
    if not name and not folder:
        raise ToolProblem("a path must name a file")
    return name


def ended_lines(text: str) -> list[str]:
    """Lines with their ends. Only a line feed ends one, as in diffs and editors: a form feed does not."""
    lines = text.split("\n")
    last = lines.pop()
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def plain_lines(text: str) -> list[str]:
    """Lines without their ends."""
    return [line.rstrip("\r\n") for line in ended_lines(text)]
