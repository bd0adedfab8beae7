"""The object store: immutable objects under safe keys, created once and never overwritten."""

from rl_core.store.object_store import ObjectInfo, ObjectStore, check_key, open_store

__all__ = ["ObjectInfo", "ObjectStore", "check_key", "open_store"]
