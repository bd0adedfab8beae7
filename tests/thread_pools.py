"""How many threads the decoding and hashing of weights has."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest


def watch(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Threads of each pool that is made, by what it is for; hashing outside of a hop is `leaves`."""
    made: defaultdict[str, list[int]] = defaultdict(list)

    class Watched(ThreadPoolExecutor):
        def __init__(self, threads: int, thread_name_prefix: str = "leaves") -> None:
            made[thread_name_prefix].append(threads)
            super().__init__(threads, thread_name_prefix)

    for module in ("apply", "root"):
        monkeypatch.setattr(f"rl_core.delta.{module}.ThreadPoolExecutor", Watched)
    return made
