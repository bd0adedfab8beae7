"""Runs inside a sandbox: unpacks wheels into a folder of the repository, and compiles what they hold."""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import sys
import zipfile


def unpack(wheel: str, folder: str) -> None:
    """A wheel's files. Those in its `.data` go where pip would put them; scripts and headers are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            parts = member.filename.split("/")
            if len(parts) > 2 and parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue
                parts = parts[2:]
            if member.is_dir() or not all(part not in ("", ".", "..") for part in parts):
                continue
            path = os.path.join(folder, *parts)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with archive.open(member) as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target)


def main() -> None:
    """Unpack all wheels beside this file into the folder that is named."""
    folder = sys.argv[1]
    wheels = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wheels")
    for name in sorted(os.listdir(wheels)):
        unpack(os.path.join(wheels, name), folder)
    # By hash and unchecked: the same bytes each time, and no look at a clock.
    compileall.compile_dir(folder, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


if __name__ == "__main__":
    main()
