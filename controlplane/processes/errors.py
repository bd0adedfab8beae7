"""What goes wrong around processes. Every message ends with what to do."""

from __future__ import annotations

from controlplane.errors import Conflict, Unavailable


class ServiceFailed(Unavailable):
    """PostgreSQL or Valkey does not start or does not stop."""

    code = "service_failed"
    retryable = False


class AlreadyRunning(Conflict):
    """Another `manage.py up` or `manage.py demo` supervises this state folder."""

    code = "already_running"


class PortTaken(Conflict):
    """The wanted port is in use by another program."""

    code = "port_taken"


class DemoFault(Unavailable):
    """A demonstration cannot go on. The message says what to look at."""

    code = "demo_fault"
    retryable = False


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""
