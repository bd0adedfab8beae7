"""File trees as values: which are accepted, what names a snapshot of one, and what differs from it.

A tree maps normalised relative paths to contents. A layer maps them to contents or None, for deleted: what differs from
a base. Both hold regular files alone. A file that begins as a script or an ELF program does is executable in a world.

A snapshot is one blob: the header's length as text, a newline, the header, and the contents one after another. The
header has a line `SIZE PATH` for each file, in the order of paths. Its identifier is the blob's BLAKE2b digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from rl_core.errors import SpecError
from rl_core.sandbox.protocol import MIB, Layer

MAX_TREE_FILES = 10_000
MAX_TREE_BYTES = 256 * MIB
MAX_DEPTH = 32
_MAX_PATH, _MAX_NAME_BYTES = 240, 255
_LENGTH_DIGITS = len(str(MAX_TREE_BYTES))
_PAGE = 4096


def plain_path(name: str) -> bool:
    """Whether a name is a normalised relative path without anything odd in it."""
    parts = name.split("/")
    return (
        name.isprintable()
        and len(name) <= _MAX_PATH
        and len(parts) <= MAX_DEPTH
        and not any(part in ("", ".", "..") or len(part.encode()) > _MAX_NAME_BYTES for part in parts)
    )


def check_names(names: Collection[str]) -> None:
    """Raises: SpecError for a name that is no plain path, or that is a file and a folder at once."""
    known = set(names)
    for name in names:
        if not plain_path(name):
            raise SpecError(f"file name {name[:80]!r} must be a plain relative path of at most {_MAX_PATH} characters")
        end = name.rfind("/")
        while end > 0:
            if name[:end] in known:
                raise SpecError(f"{name[:end]!r} is a file and a folder at once")
            end = name.rfind("/", 0, end)


def encode_tree(tree: Mapping[str, bytes]) -> tuple[str, bytes]:
    """The identifier of a tree's snapshot, and its blob. Raises: SpecError."""
    names = sorted(tree)
    header = "".join(f"{len(tree[name])} {name}\n" for name in names).encode()
    blob = b"".join([b"%d\n" % len(header), header, *(tree[name] for name in names)])
    read_index(blob, len(blob))
    return blob_id(blob), blob


def blob_id(blob: bytes) -> str:
    """What names the snapshot whose blob this is."""
    return hashlib.blake2b(blob, digest_size=32).hexdigest()


def read_index(start: bytes, size: int) -> dict[str, tuple[int, int]]:
    """Offset and size of each file, from a blob's start (its header at least) and its size. Raises: SpecError."""
    if size > MAX_TREE_BYTES:
        raise SpecError(f"a tree of {size} bytes; at most {MAX_TREE_BYTES}")
    newline = start.find(b"\n", 0, _LENGTH_DIGITS + 1)
    length = bytes(start[: max(newline, 0)])
    offset = newline + 1 + int(length) if length.isdigit() else -1
    if not newline < offset <= len(start):
        raise SpecError("not a snapshot")
    try:
        lines = bytes(start[newline + 1 : offset]).decode().split("\n")
    except UnicodeDecodeError as error:
        raise SpecError("a snapshot with names that are not UTF-8") from error
    index: dict[str, tuple[int, int]] = {}
    if len(lines) - 1 > MAX_TREE_FILES:
        raise SpecError(f"a tree of {len(lines) - 1} files; at most {MAX_TREE_FILES}")
    if lines.pop():
        raise SpecError("a snapshot whose header is cut off")
    for line in lines:
        bytes_, _, name = line.partition(" ")
        if not bytes_.isdecimal() or not bytes_.isascii() or len(bytes_) > _LENGTH_DIGITS:
            raise SpecError("a snapshot with a size that is none")
        index[name] = (offset, int(bytes_))
        offset += int(bytes_)
    if offset != size or list(index) != sorted(index) or len(index) != len(lines):
        raise SpecError("a snapshot that does not add up")
    check_names(index)
    return index


def disk_use(sizes: Iterable[int]) -> int:
    """What files of these sizes take on a tmpfs."""
    return sum(-(-size // _PAGE) * _PAGE for size in sizes)


def check_layer(layer: Layer, base: Collection[str], *, max_files: int, max_bytes: int) -> None:
    """Whether a layer fits its base and its bounds. Raises: SpecError."""
    if len(layer) > max_files:
        raise SpecError(f"a layer of {len(layer)} files; at most {max_files}")
    size = sum(len(content) for content in layer.values() if content is not None)
    if size > max_bytes:
        raise SpecError(f"a layer of {size} bytes; at most {max_bytes}")
    kept = [name for name in base if name not in layer]
    check_names([*kept, *(name for name, content in layer.items() if content is not None)])
    for name, content in layer.items():
        if content is None and name not in base:
            raise SpecError(f"the layer deletes {name[:80]!r}, which the base does not have")
