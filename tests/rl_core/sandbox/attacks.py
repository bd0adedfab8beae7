"""Attacks as programs. Each prints ESCAPED when it got somewhere, `held` when it did not.

It says so at once: others read it while it still runs. Those in HARMLESS are also run outside any sandbox, to show that
they work where nothing holds them.
"""

_TRY = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call):
    try:
        result = call()
    except OSError as error:
        print("held", error, flush=True)
    else:
        print("ESCAPED" if result else "held", repr(result)[:200], flush=True)
def syscall(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result + 1
"""


def attack(body: str) -> str:
    return _TRY + body


# Placeholders: {port} a listener on the host's loopback, {abstract} an abstract socket of the host, {path} a host file.
HARMLESS = {
    "host file": "attempt(lambda: open({path!r}).read())",
    "host passwords": "attempt(lambda: 'root:' in open('/etc/passwd').read())",
    "process list": "attempt(lambda: len([p for p in os.listdir('/proc') if p.isdigit()]) > 1)",
    "secret in an environment": "attempt(lambda: 'SLIPWAY_SECRET' in os.environ)",
    "loopback service": "attempt(lambda: socket.create_connection(('127.0.0.1', {port}), 2).recv(16))",
    "abstract socket": "s = socket.socket(socket.AF_UNIX)\nattempt(lambda: (s.connect({abstract!r}), s.recv(16))[1])",
    "netlink socket": "attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))",
    "kernel parameters": "attempt(lambda: open('/proc/sys/kernel/hostname').read())",
    "new user namespace": "pid = os.fork()\nif not pid:\n    os._exit(libc.syscall(272, 0x10000000) != 0)\n"
    "attempt(lambda: os.waitstatus_to_exitcode(os.wait()[1]) == 0)",
    "pidfd of another": "attempt(lambda: syscall(434, os.getppid(), 0) and syscall(438, 3, 1, 0))",
    "handle of a file": "attempt(lambda: syscall(303, -100, b'/', (ctypes.c_uint32 * 64)(128, 0), "
    "ctypes.byref(ctypes.c_int()), 0))",
}

CONTAINED = {
    "inherited descriptors": "attempt(lambda: [fd for fd in range(3, 256) if libc.fcntl(fd, 1) >= 0])",
    "ptrace": "attempt(lambda: syscall(101, 16, os.getppid(), 0, 0))",
    "memory of another": "attempt(lambda: syscall(311, os.getppid(), 0, 0, 0, 0, 0))",
    "io_uring": "attempt(lambda: syscall(425, 8, (ctypes.c_char * 120)()))",
    "bpf": "attempt(lambda: syscall(321, 0, 0, 0))",
    "keyring": "attempt(lambda: syscall(250, 0, -3, 1))",
    "userfaultfd": "attempt(lambda: syscall(323, 1))",
    "mount": "attempt(lambda: syscall(165, b'none', b'/work', b'tmpfs', 0, 0))",
    "clone3 into namespaces": "attempt(lambda: syscall(435, (ctypes.c_uint64 * 11)(0x10000000), 88))",
    "vsock": "attempt(lambda: socket.socket(40, socket.SOCK_STREAM))",
    "packet socket": "attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
    "kernel crypto": "attempt(lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET))",
    "internet": "attempt(lambda: socket.create_connection(('192.0.2.1', 80), 2))",
    "terminal injection": "import fcntl\nattempt(lambda: fcntl.ioctl(0, 0x5412, b'x') or True)",
    "device node": "attempt(lambda: os.mknod('/work/disk', 0o60600, os.makedev(8, 0)) or True)",
    "become root": "attempt(lambda: os.setuid(0) or True)",
    "write the root": "attempt(lambda: open('/evil', 'w'))",
    "write the library": "attempt(lambda: open(os.__file__, 'a'))",
    "write a device folder": "attempt(lambda: open('/dev/evil', 'w'))",
    "shared memory": "attempt(lambda: open('/dev/shm/evil', 'w'))",
    "kill the supervisor": "attempt(lambda: os.kill(os.getppid(), 9) or True)",
    "kill everybody": "import signal\nsignal.signal(15, signal.SIG_IGN)\nattempt(lambda: os.kill(-1, 15) or False)",
    "x32 calls": "import signal\npid = os.fork()\nif not pid:\n    libc.syscall(0x40000000 + 39)\n    os._exit(0)\n"
    "attempt(lambda: os.waitstatus_to_exitcode(os.wait()[1]) != -signal.SIGSYS)",
}
