"""Embedded PostgreSQL and Valkey of one state folder: start, stop, status.

`services.json` holds their addresses with passwords; `services/` their logs and process records; `postgres/` and
`valkey/` their data. Starting is idempotent and repairs what a crash left: a half-made cluster, a stale lock file, a
lost or damaged `services.json` (passwords are set anew), a port that another program took meanwhile.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

import msgspec
import psutil

from controlplane.errors import ControlPlaneError
from controlplane.processes.errors import PortTaken
from controlplane.processes.ports import free_port, port_is_free
from controlplane.processes.postgres import Postgres
from controlplane.processes.records import exclusive, write_atomically
from controlplane.processes.valkey import Valkey

_LOCK_TIMEOUT_S = 120


class ServiceUrls(msgspec.Struct, frozen=True):
    """The contents of `services.json`."""

    database_url: str = ""
    redis_url: str = ""


class ServiceStatus(NamedTuple):
    """One service as `manage.py services status` shows it."""

    name: str
    pid: int | None
    port: int | None


class _Address(NamedTuple):
    port: int
    password: str
    known: bool  # the password is the one the data were made with


def services_start(state: Path, *, say: Callable[[str], None] = lambda line: None) -> ServiceUrls:
    """Start what is not running and return the addresses. `say` hears a line before each slow part.

    Raises: ServiceFailed, PortTaken (three ports in a row were lost to other programs between choice and start),
        AlreadyRunning (another starter holds the lock for two minutes).
    """
    with _locked(state):
        (state / "services" / "stopped").unlink(missing_ok=True)
        for _ in range(2):
            with contextlib.suppress(PortTaken):  # the next try sees it taken and chooses another
                return _start(state, say)
        return _start(state, say)


def _start(state: Path, say: Callable[[str], None]) -> ServiceUrls:
    urls = _read(state)
    postgres, valkey = _services(state)
    database = _address(urls.database_url, postgres.running())
    broker = _address(urls.redis_url, valkey.running(), taken=database.port)
    urls = ServiceUrls(
        postgres.url(port=database.port, password=database.password),
        valkey.url(port=broker.port, password=broker.password),
    )
    # Written first: a crash between here and the start is repaired by the next start, with the same passwords
    # for whatever was initialised meanwhile. Unknown ones are written only once they are set.
    if (database.known and broker.known) or not (state / "postgres" / "data").exists():
        _write(state, urls)
    for service, address in ((postgres, database), (valkey, broker)):
        if service.running() is None or not address.known:
            say(f"starting {service.name} on port {address.port}")
            service.start(port=address.port, password=address.password, password_known=address.known)
    _write(state, urls)
    return urls


def services_stop(state: Path) -> list[str]:
    """Stop what runs and return the names of what was stopped. Data and `services.json` stay."""
    with _locked(state):
        stopped = []
        (state / "services" / "stopped").touch()
        for service in reversed(_services(state)):
            if service.running() is not None:
                service.stop()
                stopped.append(service.name)
        return stopped


def services_status(state: Path) -> list[ServiceStatus]:
    """What runs now. Takes no lock."""
    urls = _read(state)
    ports = [urlsplit(url).port for url in (urls.database_url, urls.redis_url)]
    processes = [service.running() for service in _services(state)]
    names = [service.name for service in _services(state)]
    return [ServiceStatus(n, p.pid if p else None, port) for n, p, port in zip(names, processes, ports, strict=True)]


def services_keep(state: Path, *, say: Callable[[str], None], every_s: float = 1.0) -> NoReturn:
    """Start again what dies, for as long as this process lives. What was stopped by `services stop` stays stopped."""
    pause_s = every_s
    while True:
        time.sleep(pause_s)
        if services_stopped_on_purpose(state) or all(status.pid for status in services_status(state)):
            continue
        try:
            services_start(state, say=say)
            pause_s = every_s
        except ControlPlaneError as error:
            pause_s = min(30.0, pause_s * 2)
            say(f"{error} (next try in {pause_s:.0f} s)")


def services_stopped_on_purpose(state: Path) -> bool:
    """Whether `services stop` was the last word: then nothing starts them again by itself."""
    return (state / "services" / "stopped").exists()


def _locked(state: Path) -> AbstractContextManager[None]:
    return exclusive(
        state / "services" / "lock",
        timeout_s=_LOCK_TIMEOUT_S,
        message=f"another process is starting or stopping the services of {state}; wait for it, or end it",
    )


def _services(state: Path) -> tuple[Postgres, Valkey]:
    logs = state / "services"
    return (
        Postgres(state / "postgres", log=logs / "postgres.log", record=logs / "postgres.json"),
        Valkey(state / "valkey", log=logs / "valkey.log", record=logs / "valkey.json"),
    )


def _read(state: Path) -> ServiceUrls:
    try:
        return msgspec.json.decode((state / "services.json").read_bytes(), type=ServiceUrls)
    except (OSError, msgspec.MsgspecError):
        return ServiceUrls()


def _write(state: Path, urls: ServiceUrls) -> None:
    write_atomically(state / "services.json", msgspec.json.format(msgspec.json.encode(urls)))


def _address(url: str, process: psutil.Process | None, *, taken: int = 0) -> _Address:
    """The recorded address; a new password when none is recorded, a new port when the old one is another's."""
    parts = urlsplit(url)
    password, port = parts.password, parts.port
    if port is None or (process is None and not port_is_free(port)):
        port = free_port(taken={taken})
    return _Address(port, password or secrets.token_urlsafe(24), password is not None)
