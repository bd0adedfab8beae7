"""What prepares an update gives way to the decode loop of the same process."""

from __future__ import annotations

import os
import threading
from typing import Final

_NICENESS: Final = 5


def give_way() -> None:
    """Let the calling thread, and those that it starts, run after the rest of the process."""
    niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICENESS
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
