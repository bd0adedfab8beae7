"""Everything on one machine: which processes `manage.py up` runs, and their life from start to a clean end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from django.conf import settings
from django.db import connection

from controlplane.processes.errors import PortTaken
from controlplane.processes.local_engines import LocalEngines
from controlplane.processes.output import Say
from controlplane.processes.ports import free_port, port_is_free
from controlplane.processes.specs import ProcessSpec, conductor_spec, keeper_spec, sandboxd_spec, web_spec, worker_spec
from controlplane.processes.supervisor import Supervisor
from controlplane.states import Queue

FIRST_WEB_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What to run. `terminal` None keeps the processes' lines to their log files."""

    web_port: int
    terminal: TextIO | None
    say: Say
    engines: LocalEngines
    parent: int | None = None

    async def run(self, *, started: Callable[[], None]) -> None:
        """Run until a signal, or the end of the parent. The caller holds the lock and has made the services ready."""
        supervisor = Supervisor(
            settings.RUNTIME_DIR,
            logs=settings.STATE_DIR / "logs",
            working_dir=settings.BASE_DIR,
            terminal=self.terminal,
            say=self.say,
        )
        await supervisor.run(
            base_specs(web_port=self.web_port, say=self.say),
            started=started,
            poll=lambda: _with_connection(self.engines.new_specs),
            poll_s=2.0,
            parent=self.parent,
        )


def base_specs(*, web_port: int, say: Say) -> list[ProcessSpec]:
    """All but the engines, which the database tells of."""
    # Unless it was said otherwise, remote environments are on this machine too.
    public_url = settings.PUBLIC_URL or f"http://127.0.0.1:{web_port}"
    specs = [web_spec(port=web_port), conductor_spec(), *(worker_spec(queue, public_url=public_url) for queue in Queue)]
    if settings.EMBEDDED:
        specs.append(keeper_spec())
    refusal = sandbox_refusal()
    if refusal:
        say(f"sandboxd is not started, so environments that run code are refused: {refusal}")
    else:
        specs.append(sandboxd_spec(settings.SANDBOX_SOCKET))
    return specs


def choose_web_port(wanted: int | None) -> int:
    """The wanted port, or the first free one from 8000 up. Raises: PortTaken."""
    if wanted is None:
        return free_port(candidates=range(FIRST_WEB_PORT, FIRST_WEB_PORT + 200))
    if not port_is_free(wanted):
        raise PortTaken(f"port {wanted} is in use by another program; end it, or choose another: --port N", "port")
    return wanted


def sandbox_refusal() -> str:
    """Why this machine cannot isolate hostile code, or nothing when it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rl_core.sandbox", "--check"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=settings.BASE_DIR,
        )
    except subprocess.TimeoutExpired:
        return "its check did not end within a minute; try: python -m rl_core.sandbox --check"
    if done.returncode == 0:
        return ""
    return (done.stderr or done.stdout).strip() or "python -m rl_core.sandbox --check failed without a word"


def state_writable(state: Path) -> None:
    """Raises: OSError when the state folder cannot be written."""
    state.mkdir(parents=True, exist_ok=True)
    probe = state / ".probe"
    probe.write_bytes(b"\0" * 4096)
    probe.unlink()


def _with_connection(query: Callable[[], Sequence[ProcessSpec]]) -> Sequence[ProcessSpec]:
    # Runs in a pool thread now and then: its connection must not outlive the call, nor an error end the supervisor.
    from django.db import Error

    try:
        return query()
    except Error:
        return []  # the database is away; its keeper brings it back, and we ask again
    finally:
        connection.close()
