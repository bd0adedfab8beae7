"""Opening stores by URL, and how patient their clients are."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from obstore import exceptions as obstore_exceptions
from obstore.store import LocalStore, from_url

from rl_core.errors import SpecError, StoreUnavailable
from rl_core.store.object_store import ObjectStore, first_line

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

# A store that answers nothing for this long is asked again, and then said to be unavailable. A request as a whole may
# take long: a slow link is no fault. Plain HTTP is spoken where an endpoint is named so.
_CLIENT: Final[ClientConfig] = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=20),
    "timeout": timedelta(hours=1),
    "allow_http": True,
}
_RETRY: Final[RetryConfig] = {
    "max_retries": 4,
    "retry_timeout": timedelta(minutes=1),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=3), "base": 2},
}


def open_store(url: str | Path) -> ObjectStore:
    """Open a store by URL: a folder path or `file:///…` (made if missing), `s3://…`, `gs://…`, `az://…`, `memory:///`.

    Credentials and endpoints of cloud stores come from the platform's usual places (obstore reads them). A replica may
    also read from an `http(s)://…` mirror, which takes nothing.
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
        if split.scheme == "memory":
            return ObjectStore(from_url(text), url=text)
        return ObjectStore(from_url(text, client_options=_CLIENT, retry_config=_RETRY), url=text)
    except (ValueError, obstore_exceptions.BaseError) as error:
        raise SpecError(
            f"not a store: {text}: {first_line(error)}; use a folder, file://, s3://, gs:// or az://"
        ) from error
