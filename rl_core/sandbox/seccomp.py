"""The system-call filter: a classic BPF program, assembled here, loaded by bubblewrap.

Everything is allowed but what the kernel need not offer to a program that computes: tracing, kernel keys, io_uring,
userfaultfd, BPF, mounting, new namespaces, odd socket families, pushing input into a terminal. `clone3` answers
ENOSYS, so that libc falls back to `clone`, whose flags a filter can see. Another architecture's calls kill.

Source: the deny list of the kernel's own interfaces most used in escapes; Linux `seccomp(2)`, `struct seccomp_data`.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

from rl_core.errors import SandboxRefused

_LOAD_NR, _LOAD_ARCH = 0, 4
_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000

# Audit architecture, then numbers of calls by name: x86-64, aarch64.
_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241), "fanotify_init": (300, 262),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "vhangup": (153, 58),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "personality": (135, 92), "memfd_secret": (447, 447),
}  # fmt: skip
_X86_ONLY = {"iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134, "ustat": 136, "sysfs": 139}
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _IOCTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29)

_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} and NEWTIME
_FAMILIES = (int(socket.AF_UNIX), int(socket.AF_INET), int(socket.AF_INET6))
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


def seccomp_program(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`. Raises: SandboxRefused for an unknown architecture."""
    name = machine or platform.machine()
    if name not in _ARCHES:
        raise SandboxRefused(f"no seccomp filter for the architecture {name}; the sandbox runs on {', '.join(_ARCHES)}")
    column = list(_ARCHES).index(name)
    program = [_op(_LD, _LOAD_ARCH), _op(_JEQ, _ARCHES[name], 1, 0), _op(_RET, _KILL), _op(_LD, _LOAD_NR)]
    if name == "x86_64":
        program += [_op(_JGE, _X32_BIT, 0, 1), _op(_RET, _KILL)]
    program += _deny([_CLONE3[column]], errno.ENOSYS)
    denied = [numbers[column] for numbers in _CALLS.values()]
    program += _deny([*denied, *(_X86_ONLY.values() if name == "x86_64" else ())], errno.EPERM)
    program += _inspect(_CLONE[column], argument=0, test=_JSET, values=(_NEW_NAMESPACES,), match_denies=True)
    for call in (_SOCKET, _SOCKETPAIR):
        program += _inspect(call[column], argument=0, test=_JEQ, values=_FAMILIES, match_denies=False)
    program += _inspect(_IOCTL[column], argument=1, test=_JEQ, values=(_TIOCSTI, _TIOCLINUX), match_denies=True)
    program.append(_op(_RET, _ALLOW))
    return b"".join(program)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _deny(numbers: list[int], error: int) -> list[bytes]:
    """Answer these calls with an error. The call's number must be loaded; it still is afterwards."""
    program: list[bytes] = []
    for number in numbers:
        program += [_op(_JEQ, number, 0, 1), _op(_RET, _ERRNO | error)]
    return program


def _inspect(number: int, *, argument: int, test: int, values: tuple[int, ...], match_denies: bool) -> list[bytes]:
    """Deny or allow one call by the low word of an argument; others pass with their number still loaded."""
    deny, allow = _op(_RET, _ERRNO | errno.EPERM), _op(_RET, _ALLOW)
    on_match, otherwise = (deny, allow) if match_denies else (allow, deny)
    body = [_op(_LD, 16 + 8 * argument)]
    for value in values:
        body += [_op(test, value, 0, 1), on_match]
    body.append(otherwise)
    return [_op(_JEQ, number, 0, len(body)), *body]
