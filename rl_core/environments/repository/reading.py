"""A folder on disk as a tree: regular files alone, bounded, and nothing from outside the folder.

The folder is somebody's repository and may be hostile. Nothing in it is run; links are not followed out of it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rl_core.errors import BuildRefused
from rl_core.sandbox.protocol import MIB
from rl_core.sandbox.trees import plain_path

MAX_FILES = 4000
MAX_BYTES = 64 * MIB
MAX_FILE_BYTES = 8 * MIB
# What tools leave behind, and what no test needs.
SKIPPED = frozenset({".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".tox", "node_modules", ".pytest_cache"})


def read_folder(folder: Path) -> dict[str, bytes]:
    """All files of a folder by path. Raises: BuildRefused for links out of it, odd files and names, and past bounds."""
    root = folder.resolve()
    if not root.is_dir():
        raise BuildRefused(f"{folder} is no folder")
    tree: dict[str, bytes] = {}
    size = 0
    for place, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in [*names, *(name for name in folders if (Path(place) / name).is_symlink())]:
            path = Path(place) / name
            shown = path.relative_to(root).as_posix()
            if not plain_path(shown):
                raise BuildRefused(f"{shown[:80]!r}: a name that no tree can hold")
            if path.is_dir():  # a link: folders are walked by themselves
                raise BuildRefused(f"{shown} is a link to a folder; put the folder itself there")
            tree[shown] = _read(root, path, shown)
            size += len(tree[shown])
            if len(tree) > MAX_FILES or size > MAX_BYTES:
                raise BuildRefused(
                    f"more than {MAX_FILES} files or {MAX_BYTES // MIB} MiB; leave out what no test needs"
                )
    if not tree:
        raise BuildRefused(f"{folder} has no files")
    return tree


def _read(root: Path, path: Path, shown: str) -> bytes:
    target = path.resolve()
    if not target.is_relative_to(root):
        raise BuildRefused(f"{shown} is a link out of the folder")
    try:
        # Without waiting: opening a fifo would otherwise never end. What was checked is what is read.
        handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            kind = os.fstat(handle)
            if not stat.S_ISREG(kind.st_mode):
                raise BuildRefused(f"{shown} is no regular file")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BuildRefused(f"{shown} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise BuildRefused(f"{shown} is larger than {MAX_FILE_BYTES // MIB} MiB")
    return content


def _refuse(error: OSError) -> None:
    raise BuildRefused(f"{error.filename} cannot be read: {error.strerror}") from error
