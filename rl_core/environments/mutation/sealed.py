"""Runs inside a sandbox: a command of the policy's, with the original of its repository out of sight.

`python3 sealed.py NAME BLOCKED COMMAND…`: what the command starts is under the rule too. See `sealing.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def main() -> None:
    """Hide, then become the command. Ends with 127 where there is no such program."""
    name, blocked, program, *arguments = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    sys.dont_write_bytecode = True
    sealing: Any = importlib.import_module("sealing")  # the file beside this one
    if not sealing.can_hide():
        sys.exit("repositories run with the original hidden, which needs a kernel with Landlock (5.13)")
    sealing.hide(sealing.originals(name, [word for word in blocked.split(",") if word]))
    try:
        os.execvp(sys.executable if program == "python3" else program, [program, *arguments])  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"{program}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
