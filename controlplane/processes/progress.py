"""One line that is written over again on a terminal; without a terminal, a line now and then."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_QUIET_S = 15.0


class Progress:
    """Shows what is under way. On a terminal in place; into a file or pipe when it changed, at most every 15 s."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._terminal = output.isatty()
        self._shown = ""
        self._next = 0.0

    def show(self, text: str) -> None:
        """Show the present state."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\033[K{text[:width]}")
        elif text != self._shown and time.monotonic() >= self._next:
            self._write(f"  … {text}\n")
            self._next = time.monotonic() + _QUIET_S
        self._shown = text

    def clear(self) -> None:
        """Make room for a whole line."""
        if self._terminal and self._shown:
            self._write("\r\033[K")
        self._shown = ""

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()
