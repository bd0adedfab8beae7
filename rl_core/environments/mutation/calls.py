"""A test of these tasks: one call of a public function or method, and what must come of it, both as trees of JSON.

A tree is a plain JSON scalar, or a list of a tag and a body: `["tuple", [1, 2]]`, `["float", "0.1"]`,
`["bytes", "00ff"]` in hexadecimal, `["new", "Fraction", [1, 3]]` for an object of the repository,
`["shown", TYPE, TEXT]` for a result known by its repr.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

Tree = Any


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`owner` is None for a function of the module, else the tree of an object whose method is called."""

    module: str
    name: str
    args: list[Tree] = []
    kwargs: dict[str, Tree] = {}
    owner: Tree = None

    def request(self, case_id: str) -> dict[str, Any]:
        """What the child is told."""
        return {
            "id": case_id,
            "module": self.module,
            "name": self.name,
            "args": self.args,
            "kwargs": self.kwargs,
            "self": self.owner,
        }

    def key(self) -> str:
        """Equal for equal calls."""
        return json.dumps([self.module, self.name, self.args, self.kwargs, self.owner], sort_keys=True)

    def text(self) -> str:
        """The call as Python."""
        words = [show(arg) for arg in self.args] + [f"{name}={show(tree)}" for name, tree in self.kwargs.items()]
        name = self.name if self.owner is None else f"{show(self.owner)}.{self.name}"
        return f"{name}({', '.join(words)})"

    def names(self) -> list[str]:
        """What a test must import of the module."""
        found = {self.name} if self.owner is None else set()
        for tree in (self.owner, *self.args, *self.kwargs.values()):
            found |= classes_of(tree)
        return sorted(found)


class Test(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call and what it must answer: `value`, with `after` where its arguments change, or `raises`."""

    call: Call
    expected: dict[str, Any]


def canonical(said: dict[str, Any]) -> str:
    """An answer without what is not judged; equal text is equal in value and in type."""
    judged = {key: said[key] for key in ("value", "after", "raises", "unclear") if key in said}
    return json.dumps(judged, sort_keys=True)


def classes_of(tree: Tree) -> set[str]:
    """Classes of the repository that a tree makes objects of."""
    if not isinstance(tree, list):
        return set()
    inner = tree[2] if tree[0] == "new" else tree[1]
    found = {tree[1]} if tree[0] == "new" else set()
    if isinstance(inner, list):
        for item in inner:
            for part in item if tree[0] == "dict" else [item]:
                found |= classes_of(part)
    return found


def tree_of(value: Any) -> Tree:
    """A literal of Python as a tree. Raises: TypeError."""
    if value is None or type(value) in (bool, int) or (type(value) is str and "\0" not in value):
        return value
    if type(value) in (float, complex):
        return [type(value).__name__, repr(value)]
    if type(value) is bytes:
        return ["bytes", value.hex()]
    if type(value) in (list, tuple, set):
        items = [tree_of(item) for item in value]
        return [type(value).__name__, sorted(items, key=json.dumps) if type(value) is set else items]
    if type(value) is dict:
        return ["dict", [[tree_of(k), tree_of(v)] for k, v in value.items()]]
    raise TypeError(f"{type(value).__name__} is no literal that a task can hold")


def show(tree: Tree) -> str:
    """A tree as Python text."""
    if not isinstance(tree, list):
        return repr(tree)
    tag, body = tree[0], tree[1]
    if tag in ("float", "complex"):
        return f"float('{body}')" if body in ("inf", "-inf", "nan") else str(body)
    if tag in ("bytes", "bytearray"):
        text = repr(bytes.fromhex(body))
        return text if tag == "bytes" else f"bytearray({text})"
    if tag == "shown":
        return str(tree[2])
    if tag == "new":
        return f"{body}({', '.join(map(show, tree[2]))})"
    if tag == "dict":
        return "{" + ", ".join(f"{show(k)}: {show(v)}" for k, v in body) + "}"
    return _show_items(tag, [show(item) for item in body])


def _show_items(tag: str, items: list[str]) -> str:
    inner = ", ".join(items)
    if tag in ("list", "iterator"):
        return f"[{inner}]"
    if tag == "tuple":
        return f"({inner},)" if len(items) == 1 else f"({inner})"
    if tag == "set":
        return f"{{{inner}}}" if items else "set()"
    return f"frozenset({{{inner}}})" if items else "frozenset()"


def tags(tree: Tree) -> set[str]:
    """Every tag inside a tree; `nan` for a float that equals nothing."""
    if not isinstance(tree, list):
        return set()
    found = {tree[0]} | ({"nan"} if "nan" in str(tree[1]) and tree[0] in ("float", "complex") else set())
    inner = tree[1] if isinstance(tree[1], list) else []
    for item in inner:
        for part in item if tree[0] == "dict" else [item]:
            found |= tags(part)
    return found
