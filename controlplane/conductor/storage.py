"""The object store, looked after: versions that nobody needs are retired, objects that no row names are collected."""

from __future__ import annotations

from django.conf import settings

from controlplane.services.exports import exports_expire
from controlplane.services.garbage import garbage_collect
from controlplane.services.retention import publications_release, versions_retire
from rl_core.store import open_store


def retire_versions() -> int:
    """Retire what nobody needs, then let go of what led to it alone; how many publications were let go.

    Exports that were written long ago go, too.
    """
    exports_expire()
    versions_retire()
    return publications_release()


def collect_garbage() -> int:
    """One collection over the whole store; how many objects were deleted. Raises: StoreUnavailable."""
    return garbage_collect(open_store(settings.STORE_URL)).deleted
