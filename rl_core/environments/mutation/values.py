"""Values as trees of JSON and back; inside a sandbox, where `child.py` takes it along."""

from __future__ import annotations

import builtins
import itertools
import json
from typing import Any

MAX_ITEMS = 60
MAX_DEPTH = 12


class NotPlain(Exception):
    """A value that cannot be told to the parent."""


def encode(value: Any, depth: int = 0) -> Any:
    """A value as a tree of JSON: strict in type, exact in floats, without NUL, which PostgreSQL cannot keep.

    Raises: NotPlain.
    """
    kind = type(value)
    if depth > MAX_DEPTH or (kind is str and "\0" in value):
        raise NotPlain
    if value is None or kind in (bool, int, str):
        return value
    if kind in (float, complex):
        return [kind.__name__, repr(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind in (list, tuple):
        return [kind.__name__, _items(value, depth)]
    if kind in (set, frozenset):
        return [kind.__name__, sorted(_items(value, depth), key=json.dumps)]
    if kind is dict:
        return ["dict", [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
    if kind.__module__ not in ("builtins", "types") and any("__repr__" in vars(base) for base in kind.__mro__[:-1]):
        return _shown(kind, value)
    if hasattr(kind, "__next__"):
        return ["iterator", _items(list(itertools.islice(value, MAX_ITEMS + 1)), depth)]
    raise NotPlain


def _items(values: Any, depth: int) -> list[Any]:
    if len(values) > MAX_ITEMS:
        raise NotPlain
    return [encode(item, depth + 1) for item in values]


def _shown(kind: type, value: Any) -> list[Any]:
    text = repr(value)
    if type(text) is not str or " at 0x" in text or text.startswith("<"):
        raise NotPlain
    return ["shown", kind.__name__, text]


def decode(tree: Any, module: Any) -> Any:
    """The value of a tree; `new` makes an object of a class of the repository."""
    if not isinstance(tree, list):
        return tree
    tag, body = tree[0], tree[1]
    if tag == "new":
        return getattr(module, body)(*(decode(item, module) for item in tree[2]))
    if tag == "dict":
        return {decode(k, module): decode(v, module) for k, v in body}
    kind = getattr(builtins, tag)
    if tag in ("float", "complex"):
        return kind(body)
    if tag in ("bytes", "bytearray"):
        return kind.fromhex(body)
    return kind([decode(item, module) for item in body])
