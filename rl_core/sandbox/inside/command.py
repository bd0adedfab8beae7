"""The command's process, from inside: made ahead of its job, confined, and then the command itself.

It is a fork of the supervisor's interpreter, made before there is a job. A Python program of the form `python3 -I -S
FILE …` or `python3 -I -S -c CODE …` runs in it as it is: it is an interpreter fresh from its start, with these very
flags. Every other command takes its place by exec.
"""

from __future__ import annotations

import marshal
import os

from rl_core.sandbox.inside import program
from rl_core.sandbox.inside.confine import landlock

TYPE_CHECKING = False  # as type checkers know it: importing typing takes as long as the rest
if TYPE_CHECKING:
    from typing import NoReturn

_PYTHON = "/python/bin/python3"
_FLAGS = ["-I", "-S"]
_LAST_DESCRIPTOR = 256


def confined(keep: int | None, *, confine: bool) -> None:
    """Close everything but the standard streams, `keep` moved to 3; then Landlock. Ends the process if that fails."""
    if keep is not None and keep != 3:
        os.dup2(keep, 3)
    os.closerange(3 if keep is None else 4, _LAST_DESCRIPTOR)
    if confine and not landlock():
        os._exit(126)


def become_command(gate: int, *, confine: bool) -> NoReturn:
    """In the command's process: wait at the gate for the command, then be it."""
    confined(gate, confine=confine)
    with open(3, "rb") as pipe:
        argv, cwd, stdin = marshal.load(pipe)  # noqa: S302  # from the supervisor
    if stdin:
        os.dup2(os.open(stdin, os.O_RDONLY), 0)
    os.closerange(3, _LAST_DESCRIPTOR)
    os.chdir(cwd)
    if argv[0] == "python3" and argv[1:3] == _FLAGS:
        if argv[3:4] == ["-c"] and len(argv) > 4:
            program.run(argv[4], "<string>", ["-c", *argv[5:]], argv)
        if len(argv) > 3 and not argv[3].startswith("-"):
            path = os.path.join(cwd, argv[3])
            program.run(program.read(path), path, argv[3:], argv)
    execute(argv)


def execute(argv: list[str]) -> NoReturn:
    """Become another program. Ends the process if there is none."""
    path = _PYTHON if argv[0] == "python3" else argv[0]
    try:
        os.execvp(path, argv)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)
