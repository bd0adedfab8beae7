"""A policy's changes to a file tree, as one artefact of its trajectory: all that graders of repositories look at.

A world exports them, and a grader puts them over a fresh copy of the tree. The artefact is a JSON object: a text for a
file as it is now, null for one that was deleted, `{"base64": …}` for a file that is no UTF-8 text, or that JSON makes
longer than base64 does.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

import msgspec

from rl_core.errors import PatchRefused
from rl_core.sandbox.protocol import MIB, Layer
from rl_core.sandbox.trees import plain_path

PATCH = "patch"
# Of a task's input: the identifier of the base tree, where that holds more than the task's own files.
SNAPSHOT = "snapshot"
MAX_PATCH_BYTES = 12 * MIB  # what a repository's world lets a policy change fits, however it is written down
MAX_PATCH_FILES = 1024


class _Binary(msgspec.Struct, forbid_unknown_fields=True):
    base64: str


def encode_patch(layer: Layer) -> str:
    """A layer as the text of the artefact `PATCH`: equal layers give equal texts."""
    return msgspec.json.encode({path: _encoded(layer[path]) for path in sorted(layer)}).decode()


def decode_patch(text: str) -> Layer:
    """The layer that an artefact holds. Raises: PatchRefused for what is none, or is over its bounds."""
    if len(text) > MAX_PATCH_BYTES:
        raise PatchRefused(f"the patch has {len(text)} characters; at most {MAX_PATCH_BYTES}")
    try:
        files = msgspec.json.decode(text, type=dict[str, str | _Binary | None])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise PatchRefused(f"the patch is not what a world exports: {error}") from error
    if len(files) > MAX_PATCH_FILES:
        raise PatchRefused(f"the patch has {len(files)} files; at most {MAX_PATCH_FILES}")
    for path in files:
        if not plain_path(path):
            raise PatchRefused(f"the patch has a file {path[:80]!r}; paths are plain and relative")
    return {path: _decoded(path, content) for path, content in files.items()}


def exported_patch(artifacts: Mapping[str, str]) -> Layer:
    """What a trajectory changed; nothing where its world exported no patch. Raises: PatchRefused."""
    return decode_patch(artifacts.get(PATCH, "{}"))


def _encoded(content: bytes | None) -> str | _Binary | None:
    if content is None:
        return None
    try:
        text = content.decode()
        if 3 * len(msgspec.json.encode(text)) <= 4 * len(content) + 64:
            return text
    except UnicodeDecodeError:
        pass
    return _Binary(base64.b64encode(content).decode())


def _decoded(path: str, content: str | _Binary | None) -> bytes | None:
    if isinstance(content, _Binary):
        try:
            return base64.b64decode(content.base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise PatchRefused(f"the patch's {path[:80]!r} is not base64") from error
    return None if content is None else content.encode()
