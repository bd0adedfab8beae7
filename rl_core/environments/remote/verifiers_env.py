"""Environments of the `verifiers` library, served behind the remote protocol by one command. Standard library alone.

    python -m rl_core.environments.remote.verifiers_env TASKSET --secret-file FILE [--port 9000] [--install PACKAGE ...]

makes a virtual environment of its own (the library's pins clash with ours), installs `verifiers` and what is named into
it, once, and serves the taskset there. What else it is given goes to `verifiers_server`. Exit codes: 0 served until it
was told to end, 1 not installed, 2 wrong arguments, else the server's own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.4.0"
_ROOT = Path(__file__).resolve().parents[3]
_DONE = "installed"


def ensure(folder: Path, packages: list[str]) -> Path:
    """The interpreter of a virtual environment that has the library and the packages. Raises: CalledProcessError."""
    wanted = [f"verifiers=={VERSION}", "uv", *packages]  # uv prepares the programs of the library's harnesses
    mark = folder / _DONE
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    python = folder / "bin" / "python"
    if not (mark.is_file() and mark.read_text() == digest):
        sys.stderr.write(f"installing {', '.join(wanted)} into {folder}, once\n")
        venv.create(folder, with_pip=True, clear=not python.exists())
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True, stdout=sys.stderr)
        mark.write_text(digest)
    return python


def command(python: Path, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """What serves there, and its environment: our modules are found, our packages are not."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])  # noqa: TID251  # passed on
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(_ROOT)}  # noqa: TID251
    return [str(python), "-m", "rl_core.environments.remote.verifiers_server", *arguments], environment


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m rl_core.environments.remote.verifiers_env", add_help=False)
    parser.add_argument("--venv", type=Path, default=Path("var") / "verifiers" / VERSION)
    parser.add_argument("--install", action="append", default=[], help="a package that the environment needs")
    options, rest = parser.parse_known_args(arguments)
    try:
        python = ensure(options.venv.resolve(), options.install)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.stderr.write(f"the library is not installed: {error}\n")
        return 1
    words, environment = command(python, rest)
    process = subprocess.Popen(words, env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: process.terminate())
    code = process.wait()
    return 0 if code == -signal.SIGTERM else code


if __name__ == "__main__":
    raise SystemExit(main())
