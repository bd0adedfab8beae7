"""One control for each layer: an attack that the whole sandbox holds, and that gets through when this layer is off.

Where a second layer holds the same attack, that one is off in both worlds (`also_off`). The attacks are text in which
{names} of the host's things are filled in by `without_layer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_core.sandbox.seccomp import _CALLS, _X86_ONLY
from tests.rl_core.sandbox.attacks import CONTAINED, HARMLESS, attack

NAMESPACES = ("user", "pid", "net", "mount", "ipc", "uts", "cgroup")
DENIED = [numbers[0] for numbers in _CALLS.values()] + list(_X86_ONLY.values())
RLIMITS = ("CPU", "FSIZE", "NOFILE", "CORE", "MSGQUEUE", "MEMLOCK", "STACK", "NPROC")


@dataclass(frozen=True)
class Control:
    """What is taken away, what gets through then, and what else has to be away for that."""

    layer: str
    code: str
    also_off: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    needs_root: bool = False


def forks(count: int) -> str:
    """Make that many processes, or say how far it got."""
    return f"""
import os, time
made = 0
try:
    for _ in range({count}):
        os.fork() or time.sleep(2) or os._exit(0)
        made += 1
except OSError:
    pass
print('ESCAPED' if made == {count} else f'held at {{made}}')
"""


def raises(limit: str, value: int) -> str:
    """Give itself more of something than the hard limit."""
    return attack(
        f"import resource\ntry:\n    resource.setrlimit(resource.{limit}, ({value}, {value}))\n"
        "except ValueError as error:\n    print('held', error)\nelse:\n    print('ESCAPED')"
    )


BOMB = "x = bytearray({mib} << 20)\nprint('ESCAPED')"
INODES = "for n in range(60_000): open(f'/work/tmp/{n}', 'w').close()\nprint('ESCAPED')"
MEMFD = "import os\nfd = os.memfd_create('m')\nfor _ in range({mib}): os.write(fd, b'x' * (1 << 20))\nprint('ESCAPED')"
SPIN = "import time\nwhile time.process_time() < 2.5: pass\nprint('ESCAPED')"
QUEUE = "name, attributes = b'q', (ctypes.c_long * 8)(0, 1, 64)\n"
FILL = """
import os
attempt(lambda: [open(f'/work/{n}', 'wb').write(bytes(900_000)) for n in range(4)])
"""
ASK = """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2)
attempt(lambda: (s.connect(('127.0.0.1', {udp})), s.send(b'?'), s.recv(16))[2])
"""
# Anything but ESRCH says that there is such a process; a signal's number 0 would do as well, but Landlock holds that.
SEE = "attempt(lambda: os.getpgid({victim}))"
HOST_FILE = "attempt(lambda: open('/host' + {path!r}).read())"
LAUNCH_ENVIRONMENT = """
import glob
for path in glob.glob('/usr/proc/[0-9]*/environ'):
    attempt(lambda: b'SLIPWAY_SECRET' in open(path, 'rb').read())
"""
# With nonsense for arguments: a call that the filter lets through finds something else wrong with them.
EVERY_CALL = f"""
def refused(number):
    return libc.syscall(number, *[ctypes.c_long(-1)] * 6) < 0 and ctypes.get_errno() == 1
attempt(lambda: [number for number in {DENIED} if not refused(number)])
"""
# Escaping is not to be throttled, which the world itself does not see: `without_layer.py` says so.
SPIN_A_LITTLE = "import time\nwhile time.process_time() < 0.3: pass"
# Its survival does not show inside either.
OUTLIVE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while time.process_time() < 0.2: pass  # as on a slow machine: it still runs when the run is over
        time.sleep(60)
    os._exit(0)
"""
# That the kernel was asked at all: it then says that this is no terminal.
PUSH_INPUT = "import errno, fcntl\ntry: fcntl.ioctl(0, 0x5412, b'x')\nexcept OSError as error:\n"
PUSH_INPUT += "    print('held' if error.errno == errno.EPERM else 'ESCAPED')"
# Opened, never written.
PARAMETER = "attempt(lambda: open('/usr/hostproc/sys/kernel/core_pattern', 'r+'))"
SYSTEM = "attempt(lambda: open('/usr/hostsys/kernel/mm/transparent_hugepage/enabled', 'r+'))"
# Not run inside: what a program that belongs to root and is marked setuid becomes in bubblewrap's place.
SETUID = "id -u"
# Without these sandboxd does not start, on the word of a probe inside. What bubblewrap sets itself cannot be left out.
REFUSED = {
    "an environment": ("empty environment", "cleared environment"),
    "descriptors": ("closed descriptors",),
    "memory": ("cgroup memory",),
    "core dumps": ("rlimit CORE",),
    "files": ("rlimit NOFILE",),
    "processes": ("pid namespace",),
    "networks": ("net namespace",),
    "the host's name": ("uts namespace",),
    "a root to write": ("read-only root",),
    "system calls": ("seccomp",),
    "root": ("not root inside",),
}
ENCLOSED = {"memory_bytes": 64 << 20, "disk_bytes": 512 << 20}

CONTROLS = {
    # Limits of the kernel's on each process. One CPU second more is the hard limit's; then it is killed.
    "rlimit CPU": Control("rlimit CPU", SPIN, limits={"cpu_s": 1}),
    "rlimit FSIZE": Control("rlimit FSIZE", MEMFD.format(mib=2), limits={"disk_bytes": 1 << 20}),
    "rlimit NOFILE": Control("rlimit NOFILE", attack("attempt(lambda: [os.dup(0) for _ in range(300)])")),
    "rlimit CORE": Control("rlimit CORE", raises("RLIMIT_CORE", 1 << 20)),
    "rlimit MSGQUEUE": Control(
        "rlimit MSGQUEUE",
        attack(QUEUE + "attempt(lambda: syscall(240, name, 0o102, 0o600, attributes))"),
        also_off=("landlock",),
    ),
    "rlimit MEMLOCK": Control(
        "rlimit MEMLOCK", attack("page = ctypes.create_string_buffer(4096)\nattempt(lambda: syscall(149, page, 64))")
    ),
    "rlimit STACK": Control("rlimit STACK", raises("RLIMIT_STACK", 16 << 20)),
    "rlimit NPROC": Control("rlimit NPROC", forks(30), also_off=("cgroup pids",), limits={"pids": 16}, needs_root=True),
    # The slot's own user: a file that only the host's user may read, in a folder that the world shows.
    "own user": Control("own user", attack("attempt(lambda: open('/usr/private').read())"), needs_root=True),
    # Namespaces.
    # Unprivileged bubblewrap cannot do without one of users, so both worlds run as root, with a capability.
    "user namespace": Control(
        "user namespace",
        attack("attempt(lambda: open('/usr/foreign').read())"),
        also_off=("own user", "no capabilities"),
        needs_root=True,
    ),
    # As root alone: a run ends with kill(-1), which outside a pid namespace means all of its user's processes.
    "pid namespace": Control("pid namespace", attack(SEE), needs_root=True),
    "pid namespace, a kill": Control(
        "pid namespace", attack("attempt(lambda: os.kill({victim}, 9) or True)"), ("landlock",), needs_root=True
    ),
    "net namespace": Control("net namespace", attack(ASK)),
    "net namespace, a service": Control(
        "net namespace", attack(HARMLESS["loopback service"]), also_off=("landlock",)
    ),
    "net namespace, an abstract socket": Control(
        "net namespace", attack(HARMLESS["abstract socket"]), also_off=("landlock",)
    ),
    "mount namespace": Control("mount namespace", attack(HOST_FILE), ("landlock",)),
    "ipc namespace": Control("ipc namespace", attack("attempt(lambda: libc.msgget({queue}, 0) >= 0)")),
    "uts namespace": Control("uts namespace", attack("attempt(lambda: os.uname().nodename == {node!r})")),
    # Nothing of it shows in a world without /proc, so both worlds are given one.
    "cgroup namespace": Control(
        "cgroup namespace", attack("attempt(lambda: 'slipway-' in open('/usr/proc/self/cgroup').read())"), ("no /proc",)
    ),
    # The world's tree.
    "read-only root": Control("read-only root", attack(CONTAINED["write the root"]), ("landlock",)),
    "read-only binds": Control("read-only binds", attack("attempt(lambda: open('/usr/shared', 'w'))"), ("landlock",)),
    "sized disk": Control("sized disk", attack(FILL), limits={"disk_bytes": 1 << 20}),
    # The launch.
    "empty environment": Control("empty environment", attack(LAUNCH_ENVIRONMENT), ("no /proc", "landlock")),
    "closed descriptors": Control("closed descriptors", attack(CONTAINED["inherited descriptors"])),
    # What belongs to root, and what only root may set.
    "own user, a kernel parameter": Control(
        "own user", attack(PARAMETER), ("none of the host's /proc", "landlock"), needs_root=True
    ),
    "own user, a setting in /sys": Control(
        "own user", attack(SYSTEM), ("none of the host's /sys", "landlock"), needs_root=True
    ),
    # Limits that sandboxd holds itself.
    "output limit": Control("output limit", "print('x' * 200_000)\nprint('ESCAPED')", limits={"output_bytes": 10_000}),
    "wall limit": Control("wall limit", "import time\ntime.sleep(2)\nprint('ESCAPED')", limits={"wall_s": 0.5}),
    "cgroup kill": Control("cgroup kill", OUTLIVE, ("pid namespace", "a kill inside"), needs_root=True),
    # cgroups.
    "cgroup memory": Control("cgroup memory", MEMFD.format(mib=128), limits=ENCLOSED),
    "cgroup memory, a bomb": Control("cgroup memory", BOMB.format(mib=128), limits={"memory_bytes": 64 << 20}),
    "cgroup memory, inodes": Control("cgroup memory", INODES, limits={"memory_bytes": 32 << 20, "cpu_s": 20}),
    "cgroup pids": Control("cgroup pids", forks(18), limits={"pids": 16}),
    "cgroup cpu": Control("cgroup cpu", SPIN_A_LITTLE),
    "no new privileges": Control("no new privileges", SETUID, needs_root=True),
    # The filter of system calls.
    "seccomp, every call": Control("seccomp", attack(EVERY_CALL)),
    "seccomp, netlink": Control("seccomp", attack(HARMLESS["netlink socket"])),
    "seccomp, vsock": Control("seccomp", attack(CONTAINED["vsock"])),
    "seccomp, keyring": Control("seccomp", attack(CONTAINED["keyring"])),
    "seccomp, ptrace": Control("seccomp", attack("attempt(lambda: syscall(101, 0, 0, 0, 0))")),
    "seccomp, terminal": Control("seccomp", PUSH_INPUT),
    "seccomp, file handle": Control("seccomp", attack(HARMLESS["handle of a file"])),
    "seccomp, nested users": Control("seccomp", attack(HARMLESS["new user namespace"]), ("no nested users",)),
    "no nested users": Control("no nested users", attack(HARMLESS["new user namespace"]), ("seccomp",)),
    # Landlock.
    "landlock, a signal": Control("landlock", attack("attempt(lambda: os.kill(os.getppid(), 0) or True)")),
    "landlock, a file": Control("landlock", attack(HOST_FILE), ("mount namespace",)),
    "landlock, a service": Control("landlock", attack(HARMLESS["loopback service"]), ("net namespace",)),
}  # fmt: skip
