"""Create-only objects over obstore: a local folder by default; S3, GCS, Azure by URL, with the same semantics.

Nothing is ever overwritten, but by `copy` with the same bytes. A key is taken once; a second writer gets `ObjectExists`
and decides by the content (`put_or_adopt`). Keys carry either a content digest (blobs) or the writer's fence (segments,
manifests), so two writers meet under one key only when they mean the same bytes. What was put is durable when `put`
returns: cloud stores say so themselves, and a local store has the disk write the object and its name.

Objects are small enough for one conditional request (segments end below 64 MiB): no store completes a multipart upload
create-only in the same way as the others. Large reads go by ranges, side by side; see `delta.fetch`.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec
import obstore
from blake3 import blake3
from obstore import exceptions as obstore_exceptions

from rl_core.errors import (
    DigestMismatch,
    ObjectExists,
    ObjectMissing,
    SpecError,
    StoreError,
    StoreUnavailable,
    StoreUnsuitable,
)

PROBES: Final = "probes"  # where a store is tried for whether it refuses a second writer

Buffer: TypeAlias = bytes | bytearray | memoryview
_T = TypeVar("_T")
_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*(?:/[A-Za-z0-9._=-]+)*")
_MAX_KEY_CHARS: Final = 900  # S3 allows 1024 bytes; leave room for a store's own prefix
_BLOB_KEY: Final = re.compile(r"blobs/[0-9a-f]{2}/([0-9a-f]{64})")
# obstore reports the operating system's error as text only: ENOSPC 28, EDQUOT 122, EFBIG 27 (RLIMIT_FSIZE).
_NO_SPACE: Final = re.compile(r"os error (?:28|122|27)\b|No space left|Disk quota|File too large")
# obstore asks again until an answer begins, and says when it gave up; one that breaks off is asked for again here.
_GAVE_UP: Final = re.compile(r"after (\d+) retries, max_retries: \1\b")
_TRIES: Final = 3
_PATIENCE_S: Final = 20.0  # obstore gives up after a minute, too, and has then waited long enough

_DAMAGED: Final = "{key} does not hold the bytes of its name; the store damaged it: restore or delete it"


class ObjectInfo(msgspec.Struct, frozen=True):
    """What the store knows of an object. `modified` is the store's clock, in UTC."""

    key: str
    size_bytes: int
    modified: datetime


def check_key(key: str) -> str:
    """Return `key` if it is safe: relative, `/`-separated names of letters, digits and `._=-`, none of them dots only.

    Raises: SpecError.
    """
    if len(key) > _MAX_KEY_CHARS or not _KEY.fullmatch(key) or any(not part.strip(".") for part in key.split("/")):
        raise SpecError(f"not a safe object key: {key[:120]!r}; use relative names of letters, digits and ._=- only")
    return key


def blob_key(data: Buffer) -> str:
    """Where `put_blob` stores these bytes."""
    digest = blake3(data).hexdigest()
    return f"blobs/{digest[:2]}/{digest}"


def first_line(error: BaseException) -> str:
    """The first line of what obstore says; the rest is its innards."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _translated(action: str, key: str) -> Iterator[None]:
    """Turn obstore's errors into ours; each message says what to do next."""
    try:
        yield
    except obstore_exceptions.AlreadyExistsError as error:
        raise ObjectExists(f"cannot {action} {key}: the key is taken and objects are never overwritten") from error
    except (NotImplementedError, obstore_exceptions.NotSupportedError) as error:
        raise StoreUnsuitable(
            f"cannot {action} {key}: this kind of store does not do that: {first_line(error)}"
        ) from error
    except (FileNotFoundError, obstore_exceptions.NotFoundError) as error:
        raise ObjectMissing(f"cannot {action} {key}: nothing is stored there; check the key and the store") from error
    except (OSError, ValueError, obstore_exceptions.BaseError) as error:
        if isinstance(error, StoreError):
            raise
        reason = first_line(error)
        if _NO_SPACE.search(str(error)):
            raise StoreUnavailable(
                f"cannot {action} {key}: no space left in the store; free space or point it elsewhere ({reason})"
            ) from error
        raise StoreUnavailable(
            f"cannot {action} {key}: {reason}; check that the store is up and that this process may use it"
        ) from error


class ObjectStore:
    """One store: `put` creates, `get` and `get_range` read, `list` and `delete` serve garbage collection.

    Instances are safe to share between threads. Every method raises StoreUnavailable when the store does not answer
    or has no space left, and SpecError for an unsafe key.
    """

    def __init__(self, backend: obstore.store.ObjectStore, *, url: str, folder: Path | None = None) -> None:
        """`folder` is where a local store keeps its objects."""
        self._backend = backend
        self.url = url
        self._folder = folder
        self._trusted = folder is not None or url.startswith("memory:")  # to refuse a second writer
        self._probing = threading.Lock()

    def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        """Create the object whole, of one buffer or of several end to end: readers see all of it or nothing.

        Where an answer was lost, `ObjectExists` may speak of what this call wrote: `put_or_adopt` tells.
        Raises: ObjectExists, StoreUnsuitable.
        """
        check_key(key)
        self._require_create_only()
        self._ask("create", key, lambda: self._create(key, data))
        with _translated("create", key):
            self._sync(key)

    def _create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        obstore.put(self._backend, key, data, mode="create", use_multipart=False)

    def _ask(self, action: str, key: str, call: Callable[[], _T]) -> _T:
        patient_until = time.monotonic() + _PATIENCE_S
        for _ in range(_TRIES - 1 if self._folder is None else 0):
            try:
                with _translated(action, key):
                    return call()
            except StoreUnavailable as error:
                if _GAVE_UP.search(str(error)) or time.monotonic() > patient_until:
                    raise
        with _translated(action, key):
            return call()

    def _require_create_only(self) -> None:
        """Try once whether the store refuses a second writer: some S3-compatible ones ignore `If-None-Match`."""
        with self._probing:
            if self._trusted:
                return
            key = f"{PROBES}/{uuid.uuid4().hex}"
            try:
                self._ask("create", key, lambda: self._create(key, b"1"))
                self._ask("create", key, lambda: self._create(key, b"2"))
            except ObjectExists:
                self._trusted = True
            self.delete(key)
            if not self._trusted:
                raise StoreUnsuitable(
                    f"{self.url} overwrites objects that must be created once: it ignores If-None-Match on PUT; use a "
                    "store that honours it (Amazon S3, GCS and Azure do) or update this one"
                )

    def _sync(self, key: str) -> None:
        """Have the disk of a local store write the object and the folders on the way to it; obstore does not."""
        if self._folder is None:
            return
        path = self._folder / key
        for part in (path, *path.parents):
            descriptor = os.open(part, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if part == self._folder:
                return

    def adopt(self, key: str, size_bytes: int) -> bool:
        """Whether the object has this size, now as durable as if this call had created it. Raises: ObjectMissing."""
        with _translated("adopt", key):
            self._sync(key)
        return self.head(key).size_bytes == size_bytes

    def copy(self, source: str, key: str) -> None:
        """Have the store make `key` of what `source` holds; nothing passes through here.

        It overwrites: whoever writes `key` must mean these bytes. Raises: ObjectMissing, StoreUnsuitable.
        """
        check_key(source)
        check_key(key)
        self._ask("copy", key, lambda: obstore.copy(self._backend, source, key))
        with _translated("copy", key):
            self._sync(key)

    def put_or_adopt(self, key: str, data: Buffer) -> bool:
        """Create the object; True if this call did. An object with the same bytes is adopted (False).

        Raises: ObjectExists when the key holds other bytes.
        """
        try:
            self.put(key, data)
        except ObjectExists:
            if not self.adopt(key, memoryview(data).nbytes) or self.get(key) != data:
                raise
            return False
        return True

    def get(self, key: str) -> bytes:
        """Read the whole object. Raises: ObjectMissing."""
        check_key(key)
        return self._ask("read", key, lambda: bytes(obstore.get(self._backend, key).bytes()))

    def get_range(self, key: str, *, start: int, length: int, of: int | None = None) -> memoryview:
        """Read `length` bytes from `start`, of an object of `of` bytes where that is known.

        Raises: ObjectMissing; StoreUnavailable when the range is not there; DigestMismatch when the size is another.
        """
        if start < 0 or length < 0:
            raise SpecError(f"not a byte range: start {start}, length {length}")
        check_key(key)
        if length == 0:
            return memoryview(b"")

        def read() -> tuple[memoryview, int]:
            answer = obstore.get(self._backend, key, options={"range": (start, start + length)})
            return memoryview(answer.bytes()), answer.meta["size"]

        try:
            data, size = self._ask("read a range of", key, read)
        except StoreUnavailable:
            if of is None or (size := self.head(key).size_bytes) >= of:
                raise
            data = memoryview(b"")
        if of is not None and size != of:
            raise DigestMismatch(
                f"{key} has {size} bytes and should have {of}; restore it, or publish the version anew"
            )
        if len(data) != length:
            raise StoreUnavailable(f"{key} ended after {len(data)} of {length} bytes from {start}; it is shorter")
        return data

    def head(self, key: str) -> ObjectInfo:
        """What the store knows of the object. Raises: ObjectMissing."""
        check_key(key)
        meta = self._ask("look up", key, lambda: obstore.head(self._backend, key))
        return ObjectInfo(key, meta["size"], meta["last_modified"])

    def exists(self, key: str) -> bool:
        """Whether the key is taken."""
        try:
            self.head(key)
        except ObjectMissing:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object under the folder `prefix`, in no particular order, in one streamed pass."""
        if prefix:
            check_key(prefix.rstrip("/"))
        last: str | None = None
        for failures in itertools.count():
            try:
                with _translated("list", prefix or "the store"):
                    for page in obstore.list(self._backend, prefix or None, offset=last):
                        for meta in page:
                            yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"])
                            last = meta["path"]
                return
            except StoreUnavailable as error:
                # A remote store lists by name: the rest begins after the last one.
                if self._folder is not None or failures + 1 >= _TRIES or _GAVE_UP.search(str(error)):
                    raise

    def delete(self, key: str) -> None:
        """Remove the object, for garbage collection alone; removing what is gone is no error."""
        check_key(key)
        with suppress(ObjectMissing):
            self._ask("delete", key, lambda: obstore.delete(self._backend, key))

    def put_blob(self, data: Buffer) -> str:
        """Store bytes under their own digest and return the key `blobs/<2 hex>/<blake3>`; idempotent.

        Raises: DigestMismatch when what stands there is of another size: torn by a machine that lost power.
        """
        key = blob_key(data)
        try:
            self.put(key, data)
        except ObjectExists as error:
            if not self.adopt(key, memoryview(data).nbytes):
                raise DigestMismatch(_DAMAGED.format(key=key)) from error
        return key

    def get_blob(self, key: str) -> bytes:
        """Read a blob and check it against its key. Raises: ObjectMissing, DigestMismatch, SpecError for other keys."""
        match = _BLOB_KEY.fullmatch(key)
        if match is None:
            raise SpecError(f"not a blob key: {key[:120]!r}; expected blobs/<2 hex>/<blake3>")
        data = self.get(key)
        if blake3(data).hexdigest() != match[1]:
            raise DigestMismatch(_DAMAGED.format(key=key))
        return data

    def read(self, key: str) -> bytes:
        """The object, checked against its key where that is its digest. Raises: as `get` and `get_blob`."""
        return self.get_blob(key) if _BLOB_KEY.fullmatch(key) else self.get(key)
