"""Reading and feeding a sandbox's streams from the event loop, within bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_CHUNK = 65536


class Stream:
    """What comes out of a descriptor: at most `cap` bytes of it are kept. Closes the descriptor at its end."""

    def __init__(
        self,
        descriptor: int,
        cap: int,
        *,
        on_overflow: Callable[[], None],
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Start reading. `on_overflow` is called when there is more, `on_end` at its end."""
        self.descriptor, self.cap, self.data = descriptor, cap, bytearray()
        self._on_overflow, self._on_end = on_overflow, on_end
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def close(self) -> None:
        """Stop reading."""
        if not self.ended.done():
            self._loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.ended.set_result(None)
            if self._on_end:
                self._on_end()

    def drain(self) -> None:
        """Read what is there already, when nobody writes any more."""
        while not self.ended.done() and self._read():
            pass

    def _read(self) -> bool:
        """Returns whether there was anything to read."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # killed with something unread
            chunk = b""
        if not chunk:
            self.close()
            return False
        room = self.cap - len(self.data)
        self.data += chunk[:room]
        if len(chunk) > room:
            self._on_overflow()
        return True


class Feed:
    """What goes into a descriptor. Closes it when all is written, or when nobody reads any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest, self._open = descriptor, memoryview(b""), True
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)

    def write(self, data: bytes) -> None:
        """All that is to be written."""
        self._rest = memoryview(data)
        self._write()

    def close(self) -> None:
        """Write no more."""
        if self._open:
            self._open = False
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except BlockingIOError:
            self._loop.add_writer(self._descriptor, self._write)
        except BrokenPipeError:
            self.close()
        else:
            self.close()
