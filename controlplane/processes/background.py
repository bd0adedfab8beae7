"""`manage.py up` in the background of a demonstration: started, waited for, watched, ended with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import httpx
from django.conf import settings

from controlplane.models import Project, Replica
from controlplane.processes.bootstrap import STARTED_FLAG
from controlplane.processes.errors import DemoFault, Interrupted
from controlplane.processes.launch import log_tail
from controlplane.processes.progress import Progress
from controlplane.states import ReplicaState

READY_TIMEOUT_S = 180


class Background:
    """Everything that a demonstration needs to run, beside it."""

    def __init__(self, *, port: int, owns_services: bool, progress: Progress, flags: Sequence[str] = ()) -> None:
        """`owns_services`: the demonstration started the services, so they are to end with it, however it ends.

        `flags` are further ones of `manage.py up`.
        """
        self._port = port
        self._progress = progress
        self._flags = [*flags, *([STARTED_FLAG] if owns_services else [])]
        self._up: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the dashboard is."""
        return f"http://localhost:{self._port}"

    @contextlib.contextmanager
    def running(self, *flags: str) -> Iterator[None]:
        """`manage.py up` with these further flags, quietly, for as long as the block lasts."""
        argv = [sys.executable, "-u", str(settings.BASE_DIR / "manage.py"), "up", "--quiet", "--with-parent"]
        log = settings.STATE_DIR / "logs" / "up.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._up = subprocess.Popen(
                [*argv, *self._flags, *flags, "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches us alone; we stop it in order
            )
        try:
            yield
        finally:
            self._up.terminate()
            try:
                self._up.wait(60)
            except subprocess.TimeoutExpired:
                self._up.kill()
            self._up = None

    def wait_ready(self, *, project: Project, clusters: Sequence[str]) -> None:
        """Until the web process answers and the replicas of these clusters report. Raises: DemoFault."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        replicas = Replica.objects.filter(cluster__project=project, cluster__slug__in=clusters)
        while time.monotonic() < deadline:
            self.check_alive()
            ready = replicas.filter(state__in=[ReplicaState.READY, ReplicaState.RECONCILING]).count()
            web = self._web_answers()
            self._progress.show(f"web {'ready' if web else 'starting'}, engines {ready}/{len(clusters)}")
            if web and ready >= len(clusters):
                self._progress.clear()
                return
            time.sleep(0.5)
        raise DemoFault(f"not everything was ready within {READY_TIMEOUT_S} s; look into {settings.STATE_DIR}/logs")

    def check_alive(self) -> None:
        """Raises: DemoFault when the supervisor has ended."""
        if self._up is not None and self._up.poll() is not None:
            tail = log_tail(settings.STATE_DIR / "logs" / "up.log", lines=12)
            raise DemoFault(f"the supervisor ended; the end of {settings.STATE_DIR}/logs/up.log:\n{tail}")

    def _web_answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/healthz", timeout=2).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def interrupt_on_signals() -> None:
    """SIGINT and SIGTERM raise Interrupted, so that everything is stopped in order."""

    def raise_interrupted(number: int, frame: FrameType | None) -> Any:
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interrupted)
