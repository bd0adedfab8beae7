"""Task sets that ship with the package, made once by a command and kept compressed."""

from __future__ import annotations

from pathlib import Path

import zstandard

from rl_core.environments.tasks import TaskSet, parse_task_set

MAX_UNPACKED_BYTES = 64 * 1024 * 1024


def pack(tasks: TaskSet) -> bytes:
    """The same bytes for the same tasks."""
    return zstandard.ZstdCompressor(level=19).compress(tasks.to_jsonl())


def unpack(path: Path) -> TaskSet:
    """Raises: TaskSetError."""
    return parse_task_set(zstandard.ZstdDecompressor().decompress(path.read_bytes(), MAX_UNPACKED_BYTES))
