"""Runs inside a sandbox: builds repositories, runs calls of them in processes of their own, and answers with values.

Handed to the sandbox's Python as text, with `values.py` and `sealing.py`; else it imports the standard library alone.
It decides nothing: it gets calls under unguessable ids and says what came of them; the parent keeps what should come.

Argument: the hash seed, so that sets and dictionaries of strings differ from run to run as they do in life.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import py_compile
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from rl_core.environments.mutation import sealing
from rl_core.environments.mutation.values import NotPlain, decode, encode

MAX_TREE_CHARS = 1500
MAX_LINES = 20_000  # of the repository, that one traced call may run
CALL_CPU_S = 1.0
SUBJECT_WALL_S = 30.0
MEMORY_BYTES = 512 << 20
WITHOUT_LANDLOCK = 3  # exit code: the original cannot be hidden here
_AFRESH = "import sys; sys.modules.update(dict.fromkeys(sys.argv[4:])); import child; child.begin(*sys.argv[1:4])"
SHIFT_S = 40_000_000.0  # more than a year: who reads the clock differs from run to run


class TooLong(BaseException):
    """A call that ran too long; not an Exception, so that ordinary handlers let it pass."""


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Make one call and say what came of it: a value, and the arguments where they changed; or an exception's name."""
    module = importlib.import_module(case["module"])
    try:
        args = [decode(tree, module) for tree in case["args"]]
        named = {name: decode(tree, module) for name, tree in case["kwargs"].items()}
        owner = module if case["self"] is None else decode(case["self"], module)
        value = encode(getattr(owner, case["name"])(*args, **named))
        after = [encode(arg) if type(arg) in (list, dict, set, bytearray) else None for arg in args]
    except (NotPlain, MemoryError):
        return {"unclear": True}
    except Exception as error:  # noqa: BLE001
        return {"raises": type(error).__name__}
    said: dict[str, Any] = {"value": value}
    if any(a is not None and a != b for a, b in zip(after, case["args"], strict=True)):
        said["after"] = after
    return said if len(json.dumps(said)) <= MAX_TREE_CHARS else {"unclear": True}


class Tracer:
    """Which lines of the repository one call runs."""

    def __init__(self, root: str) -> None:
        self.root = root + "/"
        self.lines: set[tuple[str, int]] = set()
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        """A trace function: of the repository's frames alone."""
        return self.line if frame.f_code.co_filename.startswith(self.root) else None

    def line(self, frame: Any, event: str, argument: Any) -> Any:
        """Note a line. Raises: TooLong."""
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
            self.count += 1
            if self.count > MAX_LINES:
                raise TooLong
        return self.line


def traced(case: dict[str, Any], root: str) -> dict[str, Any]:
    """An answer, with the lines that led to it by file."""
    tracer = Tracer(root)
    sys.settrace(tracer)
    try:
        said = answer(case)
    except TooLong:
        if tracer.count <= MAX_LINES:
            raise
        said = {"unclear": True}
    finally:
        sys.settrace(None)
    by_file: dict[str, list[int]] = {}
    for name, number in sorted(tracer.lines):
        by_file.setdefault(os.path.relpath(name, root), []).append(number)
    return {**said, "lines": by_file}


def run_test(text: str, name: str) -> dict[str, Any]:
    """Run a test file as `python FILE` does, and say how it ended."""
    try:
        exec(compile(text, name, "exec"), {"__name__": "__main__"})  # noqa: S102
    except TooLong:
        raise
    except BaseException as error:  # noqa: BLE001
        return {"raises": type(error).__name__}
    return {"value": "passed"}


def shift_clock(shift_s: float) -> None:
    """Another time for who reads it, through `time` or the Python twin of `datetime`."""
    now, local, world = time.time, time.localtime, time.gmtime
    time.time = lambda: now() + shift_s
    time.localtime = lambda seconds=None: local(now() + shift_s if seconds is None else seconds)
    time.gmtime = lambda seconds=None: world(now() + shift_s if seconds is None else seconds)
    sys.modules["_datetime"] = None  # type: ignore[assignment]


def import_repository(root: str, subject: dict[str, Any]) -> str:
    """Import the subject's modules from its folder. Returns what went wrong, or nothing."""
    sys.path.insert(0, root)
    sys.dont_write_bytecode = True
    for name in subject["blocked"]:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in list(sys.modules):
        if name.split(".")[0] in subject["roots"]:
            del sys.modules[name]
    importlib.invalidate_caches()
    for name in subject["modules"]:
        try:
            module = importlib.import_module(name)
        except TooLong:
            raise
        except BaseException as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"[:200]
        if not str(module.__file__).startswith(root + "/"):
            return f"{name} is not taken from the repository"
    return ""


def too_long(number: int, frame: Any) -> None:
    """The handler of the timer. Raises: TooLong."""
    raise TooLong


def serve(subject: dict[str, Any], root: str, pipe: int) -> None:
    """All that one process does: import, call, answer. Each answer is a line, written at once."""

    def say(**said: Any) -> None:
        os.write(pipe, json.dumps(said).encode() + b"\n")

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, too_long)
    if subject["clock"]:
        shift_clock(subject["clock"] * SHIFT_S)
    broken = ""
    try:
        for case in [None, *subject["cases"]]:
            signal.setitimer(signal.ITIMER_PROF, CALL_CPU_S * (3 if case is None else 1))
            if case is None:
                broken = import_repository(root, subject)
                if broken:
                    break
            elif "test" in case:
                say(id=case["id"], **run_test(case["test"], os.path.join(root, case["name"])))
            else:
                say(id=case["id"], **(traced(case, root) if subject["traced"] else answer(case)))
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TooLong:
        say(end="hangs")
    else:
        say(end="broken" if broken else "done", detail=broken)


def begin_afresh(subject: dict[str, Any], root: str, pipe: int) -> None:
    """Hide the original from here on, and replace this process, whose modules are of it, by a fresh one."""
    sealing.hide(sealing.originals(subject["original"], subject["blocked"]))
    told = os.memfd_create("subject")
    with os.fdopen(os.dup(told), "wb") as file:
        file.write(json.dumps(subject).encode())
    os.lseek(told, 0, os.SEEK_SET)
    os.dup2(told, 0)
    os.set_inheritable(pipe, True)
    seed = sys.argv[1]
    argv = [sys.executable, "-S", "-s", "-c", _AFRESH, root, str(pipe), seed, *subject["blocked"]]
    os.execve(sys.executable, argv, {**environment(seed), "PYTHONPATH": root})  # noqa: S606


def begin(root: str, pipe: str, seed: str) -> None:
    """The fresh process: whatever it imports under the repository's names, it has from the repository."""
    try:
        subject = json.loads(sys.stdin.buffer.read())
        sys.path[:] = library(sys.path)
        sys.argv[:] = [__file__, seed, "again"]  # some code reads it: as it is elsewhere
        serve(subject, root, int(pipe))
    finally:
        os._exit(0)


def environment(seed: str) -> dict[str, str]:
    """All that a Python inside is given."""
    return {"PYTHONHASHSEED": seed, "LD_LIBRARY_PATH": "/python/lib", "LANG": "C.UTF-8"}


def library(path: list[str]) -> list[str]:
    """Without what lies in the working folder."""
    return [entry for entry in path if entry and not entry.startswith("/work")]


def write(root: str, name: str, text: str) -> str:
    """Write one file of a repository. Returns its path."""
    path = os.path.join(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    return path


def build_base(root: str, files: dict[str, str]) -> None:
    """Write an original once a world, and compile it, so that its subjects need not."""
    for name, text in files.items():
        path = write(root, name, text)
        if name.endswith(".py"):
            py_compile.compile(path, quiet=2)


def build(root: str, base: str, files: dict[str, str], names: list[str]) -> None:
    """A subject's repository: links into the original, and files of its own."""
    for name in names:
        path = os.path.join(root, name)
        if name in files or not name.endswith(".py"):
            continue
        compiled = importlib.util.cache_from_source(name)
        for own, link in ((path, name), (os.path.join(root, compiled), compiled)):
            os.makedirs(os.path.dirname(own), exist_ok=True)
            os.symlink(os.path.join(base, link), own)
    for name, text in files.items():
        write(root, name, text)


def run_subject(subject: dict[str, Any], root: str) -> Iterator[bytes]:
    """Fork a process for a subject and pass on the lines it writes, then how it ended if it could not say so."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2, CHANNEL):
            os.dup2(nothing, descriptor)
        try:
            if subject["original"]:
                begin_afresh(subject, root, writing)
            serve(subject, root, writing)
        finally:
            os._exit(0)
    os.close(writing)
    kept, deadline = b"", time.monotonic() + SUBJECT_WALL_S
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = pipe.read(65536)
            if not chunk:
                break
            *lines, kept = (kept + chunk).split(b"\n")
            yield from lines
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> None:
    """Run every subject of the job on stdin, one after another."""
    job = json.loads(sys.stdin.buffer.read())
    if any(subject["original"] for subject in job["subjects"]) and not sealing.can_hide():
        sys.exit(WITHOUT_LANDLOCK)
    for name, files in job["bases"].items():
        build_base(os.path.join(os.getcwd(), "bases", name), files)
    for number, subject in enumerate(job["subjects"]):
        root = os.path.join(os.getcwd(), f"r{job['run']}-{number}")
        base = os.path.join(os.getcwd(), "bases", subject["base"])
        build(root, base, subject["files"], list(job["bases"][subject["base"]]))
        for line in run_subject(subject, root):
            with os.fdopen(os.dup(CHANNEL), "wb") as channel:
                channel.write(b'{"subject": %d, "said": %s}\n' % (number, line))
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:  # again, with a hash seed, which only the environment can give
        argv = [sys.executable, "-S", "-s", __file__, sys.argv[1], "again"]
        os.execve(sys.executable, argv, environment(sys.argv[1]))  # noqa: S606
    CHANNEL = os.dup(1)
    sys.path[:] = library(sys.path)
    main()
