"""What a command needs before it can use the database: services that run, settings that name them, current tables."""

from __future__ import annotations

import os
import sys

from django.conf import settings
from django.core.management import call_command

from controlplane.processes.output import Say
from controlplane.processes.services import services_start, services_status

# Says to the command that runs on after the restart that it, not somebody before it, started the services.
STARTED_FLAG = "--services-started"


def services_ready(say: Say, *, started_before: bool = False) -> bool:
    """Start the embedded services unless the environment names others; True when this command started them.

    Settings are read once, and on the very first start the services' addresses are made after that: then the command
    line runs again, in this process. Raises: ServiceFailed, AlreadyRunning.
    """
    if not settings.EMBEDDED:
        return False
    were_running = all(service.pid is not None for service in services_status(settings.STATE_DIR))
    urls = services_start(settings.STATE_DIR, say=say)
    started = started_before or not were_running
    if urls.database_url != settings.DATABASE_URL or urls.redis_url != settings.REDIS_URL:
        sys.stdout.flush()
        flag = [STARTED_FLAG] if started and STARTED_FLAG not in sys.argv else []
        os.execv(sys.executable, [sys.executable, *sys.argv, *flag])  # noqa: S606
    return started


def migrate(say: Say) -> None:
    """Bring the tables to what the code expects."""
    say("bringing the tables up to date")
    call_command("migrate", interactive=False, verbosity=0)
