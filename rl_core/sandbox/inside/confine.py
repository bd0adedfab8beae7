"""Landlock, from inside: the last layer, which a process puts on itself.

`ctypes` takes longer to import than Landlock takes to set up, so its core is used directly.
"""

from __future__ import annotations

import _ctypes
import os

READ_ONLY = ("/python", "/usr", "/opt", "/etc", "/bin", "/lib", "/lib64")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
WORK = "/work"

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH, _GET_VERSION = 1, 1
_READ, _EVERYTHING_V1 = 0b1101, (1 << 13) - 1  # execute, read file, read directory / all of ABI 1
_READ_WRITE_FILE = 0b110
_DEVICE_NODES = 1 << 6 | 1 << 11
_RTLD_NOW = 2


def landlock() -> int:
    """Confine this process to its files, no TCP, no abstract sockets or signals to the outside. Returns the ABI."""
    syscall = _ctypes.dlsym(_ctypes.dlopen(None, _RTLD_NOW), "syscall")  # type: ignore[arg-type]
    call = _ctypes.call_function  # numbers as C int, bytes as pointers to them
    abi: int = call(syscall, (_CREATE_RULESET, None, 0, _GET_VERSION))
    if abi < 1:
        return 0
    handled = (
        _EVERYTHING_V1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    )
    attributes = [handled, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0]
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = b"".join(number.to_bytes(8, "little") for number in attributes)
    descriptor: int = call(syscall, (_CREATE_RULESET, ruleset, size, 0))
    rules = [(path, _READ) for path in READ_ONLY] + [(path, _READ_WRITE_FILE) for path in DEVICES]
    for path, access in [*rules, (WORK, handled & ~_DEVICE_NODES)]:
        try:
            parent = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        rule = access.to_bytes(8, "little") + parent.to_bytes(4, "little")
        call(syscall, (_ADD_RULE, descriptor, _RULE_PATH_BENEATH, rule, 0))
        os.close(parent)
    restricted: int = call(syscall, (_RESTRICT_SELF, descriptor, 0))
    os.close(descriptor)
    return abi if restricted == 0 else 0
