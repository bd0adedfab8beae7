"""The object store: immutable objects under safe keys, created once and never overwritten."""

from rl_core.store.object_store import PROBES, ObjectInfo, ObjectStore, blob_key, check_key
from rl_core.store.opening import open_store

__all__ = ["PROBES", "ObjectInfo", "ObjectStore", "blob_key", "check_key", "open_store"]
