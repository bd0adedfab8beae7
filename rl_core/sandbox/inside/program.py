"""Running a Python program in this interpreter as if it had been started with it.

The end is the interpreter's own, step by step, but for the last: what the interpreter itself consists of is not taken
apart, which after a fork would first have to be copied, and takes longer than to start.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

TYPE_CHECKING = False  # as type checkers know it: importing typing takes as long as the rest
if TYPE_CHECKING:
    from typing import NoReturn

_FLUSH_FAILED = 120


def read(path: str) -> bytes:
    """A program's text. Ends the process if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        os.write(2, f"python3: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n".encode())
        os._exit(2)


def run(source: str | bytes, path: str, arguments: list[str], command: list[str]) -> NoReturn:
    """Be `python3` with this program, of a file if `source` is bytes: its `__main__`, its arguments, its end."""
    for own in [module for module in sys.modules if module.startswith("rl_core")]:
        del sys.modules[own]
    own_modules = set(sys.modules)
    main = type(sys)("__main__")
    vars(main).update({name: value for name, value in vars(sys.modules["__main__"]).items() if name.startswith("__")})
    if isinstance(source, bytes):
        main.__file__, main.__cached__ = path, None  # type: ignore[attr-defined]
    sys.modules["__main__"], sys.argv, sys.orig_argv = main, arguments, command
    status = 0
    try:
        exec(compile(source, path, "exec", dont_inherit=True), vars(main))  # noqa: S102  # it is what we are here for
    except SystemExit as error:
        status = _exit_status(error.code)
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        _show(error)
        status = 1
    _finish(own_modules)
    os._exit(status & 0xFF if _flushed() or status else _FLUSH_FAILED)


def _exit_status(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _show(error: BaseException) -> None:
    """Give an error to the program's hook, without the frame of ours in its trace."""
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    error.__traceback__ = trace
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException as broken:  # noqa: BLE001  # as the interpreter does
        own = broken.__traceback__.tb_next if broken.__traceback__ else None
        broken.__context__, broken.__traceback__ = None, own
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(broken), broken, own)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)


def _finish(own_modules: set[str]) -> None:
    """Wait for threads, run what was registered for the end, let go of all that the program made."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for name in ["__main__", *(name for name in sys.modules if name not in own_modules)]:
        vars(sys.modules[name]).clear()
    gc.collect()


def _flushed() -> bool:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError) as error:
            sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
            return False
    return True
