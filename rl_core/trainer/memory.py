"""The process's memory: give freed pages back, and read the peak."""

from __future__ import annotations

import ctypes
import resource


def release_freed() -> None:
    """Hand freed heap pages back to the system, where the C library can (glibc): a step's peak does not linger."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_mb() -> int:
    """Highest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def cpu_seconds() -> float:
    """Processor time of this process so far, user and system, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
