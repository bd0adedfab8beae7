"""The first program inside a sandbox: makes the command's process, takes the job, runs it, and reports.

Everything goes over one socket. The job (marshal, by the same Python outside) comes as the descriptor of a file, and
the snapshot as another. The report is a line `ready`, then a JSON line, then the contents of the files it names.
"""

from __future__ import annotations

import _socket
import gc
import marshal
import os
import sys
import time

from rl_core.sandbox.inside import collect, command, services
from rl_core.sandbox.inside.tree import REPO, Tree

TYPE_CHECKING = False  # as type checkers know it: importing typing takes as long as the rest
if TYPE_CHECKING:
    from typing import Any, NoReturn

WORK, OUT, TEMPORARY = "/work", "/work/out", "/work/tmp"
STDIN = "/work/tmp/.stdin"
_SIGKILL = 9
_READY = b"ready\n"


def main(control_fd: int, confine: bool) -> NoReturn:
    """Run one job and end, without the interpreter's own tidying."""
    os.environ.pop("PWD", None)  # noqa: TID251  # bubblewrap sets it
    os.mkdir(OUT)
    os.mkdir(TEMPORARY)
    as_bytes = control_fd == 0  # where nothing but the standard streams can be passed
    if as_bytes:
        control_fd = os.dup(0)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    gate, opener = os.pipe()
    gc.freeze()  # what the command's interpreter collects at its end is its own, and not copied for it
    pid = os.fork()
    if not pid:
        command.become_command(gate, confine=confine)
    os.close(gate)
    os.write(control_fd, _READY)
    job, base_fd = receive_bytes(control_fd) if as_bytes else receive(control_fd)
    os.chdir(WORK)
    for name, content in job["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    tree = Tree(base_fd, job["layer"]) if job["layer"] is not None else None
    cwd = WORK if tree is None else REPO
    running, problem = services.start_all(job["services"], cwd, confine=confine)
    if not problem:
        with open(opener, "wb") as pipe:
            marshal.dump((job["argv"], cwd, STDIN if as_bytes else ""), pipe)
        _, status = os.waitpid(pid, 0)
        services.stop_all(running)
    kill_the_rest()
    report(control_fd, job, tree, None if problem else os.waitstatus_to_exitcode(status), problem)
    os._exit(0)


def receive(control_fd: int) -> tuple[dict[str, Any], int | None]:
    """Wait for the job. Ends the process when the other side is gone."""
    control = _socket.socket(fileno=control_fd)
    data, ancillary, _, _ = control.recvmsg(1, _socket.CMSG_SPACE(8))
    if not data:
        os._exit(0)
    [(_, _, packed)] = ancillary
    descriptors = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    control.detach()
    with open(descriptors[0], "rb") as file:
        job: dict[str, Any] = marshal.load(file)  # noqa: S302  # from sandboxd
    return job, descriptors[1] if len(descriptors) > 1 else None


def receive_bytes(control_fd: int) -> tuple[dict[str, Any], int | None]:
    """The same where no descriptors can be passed: three parts, each after its size, into files."""
    with open(control_fd, "rb", closefd=False) as control:
        parts = [control.read(int.from_bytes(control.read(8), "little")) for _ in range(3)]
    if not parts[0]:
        os._exit(0)
    with open(STDIN, "wb") as file:
        file.write(parts[1])
    job: dict[str, Any] = marshal.loads(parts[0])  # noqa: S302  # from sandboxd
    if not parts[2]:
        return job, None
    base_fd = os.memfd_create("base")
    with open(base_fd, "wb", closefd=False) as file:
        file.write(parts[2])
    return job, base_fd


def kill_the_rest() -> None:
    """Kill whoever the command left behind, so that nobody touches what is being collected."""
    for _ in range(2000):
        try:
            os.kill(-1, _SIGKILL)
        except ProcessLookupError:
            return
        reap()
        time.sleep(0.0005)


def reap() -> None:
    """Collect the dead among our own children, which could be killed for ever."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def report(control_fd: int, job: dict[str, Any], tree: Tree | None, status: int | None, problem: str) -> None:
    """Say how it ended and what it left."""
    found: list[collect.Found] = []
    changed: list[collect.Found] = []
    gone: list[str] = []
    refused = layer_refused = ""
    try:
        found, refused = collect.artifacts(job["artifact_files"], job["artifact_bytes"])
    except (OSError, ValueError) as error:
        refused = f"unreadable: {type(error).__name__}"
    try:
        if tree is not None:
            changed, gone, layer_refused = tree.changes(job["max_seen"], job["layer_files"], job["layer_bytes"])
    except (OSError, ValueError) as error:
        layer_refused = f"unreadable: {type(error).__name__}"
    fields = {
        "status": "null" if status is None else str(status),
        "problem": quoted(problem),
        "artifacts": listed(found),
        "refused": quoted(refused),
        "changed": listed(changed),
        "gone": f"[{', '.join(map(quoted, gone))}]",
        "layer_refused": quoted(layer_refused),
    }
    line = "{" + ", ".join(f'"{key}": {value}' for key, value in fields.items()) + "}\n"
    view = memoryview(line.encode())
    while view:
        view = view[os.write(control_fd, view) :]
    collect.send(control_fd, found)
    collect.send(control_fd, changed)
    _socket.socket(fileno=control_fd).shutdown(_socket.SHUT_WR)  # it is whole before this process is gone


def listed(files: list[collect.Found]) -> str:
    """Names and sizes as JSON."""
    return "[" + ", ".join(f"[{quoted(found.name)}, {found.size}]" for found in files) + "]"


def quoted(text: str) -> str:
    """A printable text as JSON."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
