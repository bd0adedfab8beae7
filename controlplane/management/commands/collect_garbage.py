"""`manage.py collect_garbage`: what the conductor does once an hour, now; or, with `--dry-run`, what it would do."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.conductor.storage import retire_versions
from controlplane.services.garbage import Unneeded, garbage_collect, garbage_found
from controlplane.services.retention import versions_retirable
from rl_core.errors import RlCoreError
from rl_core.store import ObjectStore, open_store


class Command(BaseCommand):
    """Exit codes: 0 done, 1 the store does not answer."""

    help = "Retire versions that nobody needs, mark objects that no row names, delete what was marked long enough ago."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """One switch."""
        parser.add_argument("--dry-run", action="store_true", help="say what would go, and why; change nothing")

    def handle(self, *args: Any, dry_run: bool, **options: Any) -> None:
        """Do it, or say what would be done."""
        try:
            store = open_store(settings.STORE_URL)
            self._look(store) if dry_run else self._collect(store)
        except RlCoreError as error:
            raise CommandError(str(error)) from error

    def _look(self, store: ObjectStore) -> None:
        for version in versions_retirable():
            self.stdout.write(f"would retire  {version.ref}  nobody needs its weights")
        due = later = 0
        for found in garbage_found(store):
            self.stdout.write(_line(found))
            due, later = due + found.due * found.info.size_bytes, later + (not found.due) * found.info.size_bytes
        self.stdout.write(
            f"{due / 1e6:,.1f} MB would be deleted now, {later / 1e6:,.1f} MB later unless a row comes to name them; "
            f"nothing is younger than {settings.GARBAGE_GRACE_S} s"
        )

    def _collect(self, store: ObjectStore) -> None:
        released = retire_versions()
        found = garbage_collect(store)
        self.stdout.write(
            f"{released} publication(s) let go; {found.marked} object(s) marked, {found.unmarked} unmarked, "
            f"{found.deleted} deleted ({found.deleted_bytes / 1e6:,.1f} MB)"
        )


def _line(found: Unneeded) -> str:
    state = "would delete" if found.due else ("is marked" if found.marked_at else "would mark")
    return f"{state:<13} {found.info.key}  {found.info.size_bytes} bytes  {found.reason}"
