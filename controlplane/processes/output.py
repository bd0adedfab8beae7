"""Output of supervised processes: whole lines with the process's name in front, and a log file for each."""

from __future__ import annotations

import itertools
import logging
import logging.handlers
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_COLOURS = itertools.cycle((36, 33, 32, 35, 34, 96, 93, 92, 95, 94))
_NAME_WIDTH = 16
_LOG_BYTES = 4 * 1024 * 1024


class LineStream:
    """Receives a process's output in pieces and passes on whole lines. An instance serves one process name."""

    def __init__(self, name: str, *, folder: Path, terminal: TextIO | None) -> None:
        """`terminal` None keeps the screen quiet; the log file is always written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._terminal = terminal
        self._prefix = _prefix(name, colour=terminal is not None and terminal.isatty())
        self._partial = b""
        self._file = logging.handlers.RotatingFileHandler(
            folder / f"{name}.log", maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8", errors="replace"
        )

    def __call__(self, data: dict[str, bytes]) -> None:
        """One piece of output, as circus hands it over."""
        *lines, self._partial = (self._partial + data["data"]).split(b"\n")
        for line in lines:
            self.line(line.decode(errors="replace"))

    def line(self, text: str) -> None:
        """One line, of the process or about it."""
        self._file.emit(logging.LogRecord("process", logging.INFO, "", 0, text, None, None))
        if self._terminal is not None:
            self._terminal.write(f"{self._prefix}{text}\n")
            self._terminal.flush()

    def close(self) -> None:
        """The last, unfinished line; then the file is closed."""
        if self._partial:
            self.line(self._partial.decode(errors="replace"))
            self._partial = b""
        self._file.close()


def _prefix(name: str, *, colour: bool) -> str:
    label = f"{name:<{_NAME_WIDTH}}│ "
    return f"\033[{next(_COLOURS)}m{label}\033[0m" if colour else label


Say = Callable[[str], None]
