"""Create-only objects over obstore: a local folder by default; S3, GCS, Azure by URL, with the same semantics.

Nothing is ever overwritten. A key is taken once; a second writer gets `ObjectExists` and decides by the content
(`put_or_adopt`). Keys carry either a content digest (blobs) or the writer's fence (segments, manifests), so two
writers meet under one key only when they mean the same bytes. What was put is durable when `put` returns: cloud stores
say so themselves, and a local store has the disk write the object and its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec
import obstore
from blake3 import blake3
from obstore import exceptions as obstore_exceptions
from obstore.store import LocalStore, from_url

from rl_core.errors import DigestMismatch, ObjectExists, ObjectMissing, SpecError, StoreError, StoreUnavailable

_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*(?:/[A-Za-z0-9._=-]+)*")
_MAX_KEY_CHARS: Final = 900  # S3 allows 1024 bytes; leave room for a store's own prefix
_BLOB_KEY: Final = re.compile(r"blobs/[0-9a-f]{2}/([0-9a-f]{64})")
# obstore reports the operating system's error as text only: ENOSPC 28, EDQUOT 122, EFBIG 27 (RLIMIT_FSIZE).
_NO_SPACE: Final = re.compile(r"os error (?:28|122|27)\b|No space left|Disk quota|File too large")

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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _translated(action: str, key: str) -> Iterator[None]:
    """Turn obstore's errors into ours; each message says what to do next."""
    try:
        yield
    except obstore_exceptions.AlreadyExistsError as error:
        raise ObjectExists(f"cannot {action} {key}: the key is taken and objects are never overwritten") from error
    except (FileNotFoundError, obstore_exceptions.NotFoundError) as error:
        raise ObjectMissing(f"cannot {action} {key}: nothing is stored there; check the key and the store") from error
    except (OSError, ValueError, obstore_exceptions.BaseError) as error:
        if isinstance(error, StoreError):
            raise
        reason = _first_line(error)
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

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Create the object whole: readers see all of it or nothing. Raises: ObjectExists."""
        with _translated("create", check_key(key)):
            obstore.put(self._backend, key, data, mode="create", use_multipart=False)
            self._sync(key)

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

    def _adopt(self, key: str, size_bytes: int) -> bool:
        """Whether the object has this size, now as durable as if this call had created it."""
        with _translated("adopt", key):
            self._sync(key)
        return self.head(key).size_bytes == size_bytes

    def put_file(self, key: str, path: Path) -> None:
        """Create the object from a file. Raises: ObjectExists, ObjectMissing when there is no such file."""
        check_key(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise ObjectMissing(f"cannot create {key}: there is no file {path}") from error
        except OSError as error:
            raise StoreUnavailable(f"cannot create {key}: {path} does not read: {error}") from error
        self.put(key, data)

    def put_or_adopt(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Create the object; True if this call did. An object with the same bytes is adopted (False).

        Raises: ObjectExists when the key holds other bytes.
        """
        try:
            self.put(key, data)
        except ObjectExists:
            if not self._adopt(key, memoryview(data).nbytes) or self.get(key) != data:
                raise
            return False
        return True

    def get(self, key: str) -> bytes:
        """Read the whole object. Raises: ObjectMissing."""
        with _translated("read", check_key(key)):
            return bytes(obstore.get(self._backend, key).bytes())

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Read `length` bytes from `start`. Raises: ObjectMissing, StoreUnavailable when the range is not there."""
        if start < 0 or length < 0:
            raise SpecError(f"not a byte range: start {start}, length {length}")
        if length == 0:
            return b""
        with _translated("read a range of", check_key(key)):
            data = bytes(obstore.get_range(self._backend, key, start=start, length=length))
        if len(data) != length:
            raise StoreUnavailable(f"{key} ended after {len(data)} of {length} bytes from {start}; it is shorter")
        return data

    def head(self, key: str) -> ObjectInfo:
        """What the store knows of the object. Raises: ObjectMissing."""
        with _translated("look up", check_key(key)):
            meta = obstore.head(self._backend, key)
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
        with _translated("list", prefix or "the store"):
            for page in obstore.list(self._backend, prefix or None):
                for meta in page:
                    yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"])

    def delete(self, key: str) -> None:
        """Remove the object, for garbage collection alone; removing what is gone is no error."""
        try:
            with _translated("delete", check_key(key)):
                obstore.delete(self._backend, key)
        except ObjectMissing:
            return

    def put_blob(self, data: bytes | bytearray | memoryview) -> str:
        """Store bytes under their own digest and return the key `blobs/<2 hex>/<blake3>`; idempotent.

        Raises: DigestMismatch when what stands there is of another size: torn by a machine that lost power.
        """
        digest = blake3(data).hexdigest()
        key = f"blobs/{digest[:2]}/{digest}"
        try:
            self.put(key, data)
        except ObjectExists as error:
            if not self._adopt(key, memoryview(data).nbytes):
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


def open_store(url: str | Path) -> ObjectStore:
    """Open a store by URL: a folder path or `file:///…` (made if missing), `s3://…`, `gs://…`, `az://…`, `memory:///`.

    Credentials of cloud stores come from the platform's usual places (obstore reads them).
    Raises: SpecError for a URL that names no store, StoreUnavailable when the folder cannot be made.
    """
    text = str(url)
    split = urlsplit(text)
    if isinstance(url, Path) or not split.scheme or split.scheme == "file":
        if split.scheme == "file" and split.netloc:
            raise SpecError(f"not a store: {text}; a local store is file:///absolute/folder, with three slashes")
        folder = Path(unquote(split.path) if split.scheme == "file" else text).expanduser().resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"cannot open the store folder {folder}: {error}") from error
        return ObjectStore(LocalStore(folder), url=folder.as_uri(), folder=folder)
    try:
        return ObjectStore(from_url(text), url=text)
    except (ValueError, obstore_exceptions.BaseError) as error:
        raise SpecError(
            f"not a store: {text}: {_first_line(error)}; use a folder, file://, s3://, gs:// or az://"
        ) from error
