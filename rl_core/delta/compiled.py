"""How loops are compiled: to machine code on first use for a type of words, without the GIL, kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from blake3 import blake3
from numba.core.caching import FunctionCache, IndexDataCacheFile

P = ParamSpec("P")
R = TypeVar("R")


class _SparingCache(FunctionCache):  # type: ignore[misc]
    """Machine code kept on disk, so that a fresh process does not compile for seconds; a full disk does not stop it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path, filename_base=self._impl.filename_base, source_stamp=_sources()
        )

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError, KeyError):
            super().save_overload(sig, data)


@cache
def _sources() -> str:
    """A digest of the package: loops inline those of other files, and numba looks at the time of their own alone."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return blake3(b"".join(file.read_bytes() for file in files)).hexdigest()


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator for functions at the top level of a module: closures would be compiled anew in every process."""
    dispatcher = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):  # no folder that may be written to
        dispatcher._cache = _SparingCache(function)
    return cast(Callable[P, R], dispatcher)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """`compiled`, for a part of loops that is to be put into them, where what is constant there is worked out."""
    return cast(Callable[P, R], numba.njit(nogil=True, forceinline=True)(function))
