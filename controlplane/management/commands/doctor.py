"""`manage.py doctor`: look at everything that must be well, and say what to do where it is not."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from controlplane.processes.diagnosis import Grade, diagnose


class Command(BaseCommand):
    """Exit codes: 0 nothing failed, 1 something did."""

    help = "Check this machine and this installation."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        """One line for each check, as soon as it is known."""
        styles = {Grade.OK: self.style.SUCCESS, Grade.WARN: self.style.WARNING, Grade.FAIL: self.style.ERROR}
        failed = False
        for finding in diagnose():
            failed = failed or finding.grade is Grade.FAIL
            self.stdout.write(f"{styles[finding.grade](f'{finding.grade.value:<5}')} {finding.what:<9} {finding.text}")
            self.stdout.flush()
        if failed:
            raise SystemExit(1)
