"""Start a server that outlives us, with its output in a log file and nothing of our environment."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from controlplane.processes.records import record_write

_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
_LOG_LIMIT_BYTES = 8 * 1024 * 1024


class _Server(subprocess.Popen[bytes]):
    def __del__(self) -> None:
        """Popen's own warns of a process that still runs; ours are meant to."""


def launch(argv: Sequence[str], *, log: Path, record: Path, stdin: str = "") -> subprocess.Popen[bytes]:
    """Start `argv` in a session of its own and record it. `stdin` is given to it and closed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
        log.replace(log.with_suffix(".old.log"))
    with log.open("ab") as output:
        process = _Server(
            argv,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd="/",
            env=_ENV,
            start_new_session=True,
        )
    record_write(record, process.pid)
    assert process.stdin is not None
    process.stdin.write(stdin.encode())
    process.stdin.close()
    return process


def run_once(argv: Sequence[str], *, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end in the same environment."""
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, cwd="/", env=_ENV)


def log_tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"
