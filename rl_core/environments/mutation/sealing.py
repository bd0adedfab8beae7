"""Runs inside a sandbox: takes the original of a repository out of a process's sight, for good, with Landlock.

Landlock can only allow, so everything is allowed that is beside what is hidden. The rule outlives `exec`, and the
process that runs the repair starts afresh under it: no module that was loaded before holds the original in memory.
"""

from __future__ import annotations

import ctypes
import os

# What a sandbox has to read from; see `inside/confine.py` of the sandbox, whose own rules stay in force above these.
_ROOTS = ("/python", "/usr", "/lib", "/lib64", "/work", "/dev")
# Copies of other people's packages, and an old copy of the standard library's own parser.
_COPIES = ("ensurepip", "lib2to3")
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE = 1 << 2

_libc = ctypes.CDLL(None, use_errno=True)


def can_hide() -> bool:
    """Whether this kernel has Landlock."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)) >= 1


def originals(name: str, twins: list[str]) -> set[str]:
    """Files and folders of the standard library with the module's code, its compiled code, and twins in C."""
    library = os.path.dirname(os.__file__)
    base = os.path.join(library, *name.split("."))
    folder, stem = os.path.split(base)
    hidden = {base, f"{base}.py", *(os.path.join(library, copy) for copy in _COPIES)}
    hidden |= _named(os.path.join(folder, "__pycache__"), {stem})
    return hidden | _named(os.path.join(library, "lib-dynload"), set(twins))


def _named(folder: str, stems: set[str]) -> set[str]:
    if not os.path.isdir(folder):
        return set()
    return {os.path.join(folder, name) for name in os.listdir(folder) if name.split(".")[0] in stems}


def hide(hidden: set[str]) -> None:
    """Let this process and all it starts open no file at or below these paths. Raises: OSError."""
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, (ctypes.c_uint64 * 1)(_READ_FILE), ctypes.c_size_t(8), 0))
    above = {parent for path in hidden for parent in _parents(path)}
    for root in _ROOTS:
        _allow(ruleset, root, hidden, above)
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, hidden: set[str], above: set[str]) -> None:
    if path in hidden or os.path.islink(path) or not os.path.exists(path):  # a link's target is allowed or not itself
        return
    if path in above:
        for name in os.listdir(path):
            _allow(ruleset, os.path.join(path, name), hidden, above)
        return
    place = os.open(path, os.O_PATH)
    rule = _READ_FILE.to_bytes(8, "little") + place.to_bytes(4, "little")
    _checked(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0))
    os.close(place)


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts))]


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock refused")
    return result
