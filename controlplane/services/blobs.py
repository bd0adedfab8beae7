"""Blobs whose keys rows name: stored so that no collector takes what is about to be named."""

from __future__ import annotations

from controlplane.models import Garbage
from rl_core.store import ObjectStore, blob_key


def blob_put(store: ObjectStore, data: bytes) -> str:
    """Store bytes under their digest, or adopt what stands there; the key. The row that names it follows soon.

    A blob of these bytes may be marked as garbage, or be under deletion just now: removing the mark waits for that,
    and a later collector has to mark it anew and wait for the whole grace period.
    """
    Garbage.objects.filter(pk=blob_key(data)).delete()
    return store.put_blob(data)


def marks_remove(*, folder_key: str) -> None:
    """Take away the marks of everything under a folder of the store that is about to be named.

    Waits for a collector that deletes some of it just now: what that took has to be written again.
    """
    Garbage.objects.filter(key__startswith=f"{folder_key}/").delete()
