"""In which order a transaction locked, read from the statements that it sent."""

from __future__ import annotations

import re

RANKS = {"lane": 0, "cluster": 1, "lendingpolicy": 2, "replica": 3, "workunit": 4}
LOGS = {"lane": 5, "project": 6}
COVERED = {"replicaslot", "loan", "transfer"}  # by their replica's lock
_LOCKING = re.compile(r'^SELECT .*?FROM "?controlplane_(\w+)"?.* FOR (?:UPDATE|NO KEY UPDATE|SHARE)', re.S)
_UPDATE = re.compile(r'^UPDATE "controlplane_(\w+)"')
_LOG = re.compile(r"INSERT INTO controlplane_topic .*?VALUES \('(\w+):", re.S)
_ID = re.compile(r'"controlplane_replica"."id" = \'([0-9a-f-]+)\'')


def faults(statements: list[str]) -> list[str]:
    """Where a transaction's statements break the order of locks; empty when they keep it."""
    found: list[str] = []
    held: set[str] = set()  # tables locked so far, and logs
    replicas: set[str] = set()
    whole = False  # every replica of the project is locked
    for sql in statements:
        log, table = _log_of(sql), _table_of(sql)
        name = f"log of a {log}" if log else table
        if not name:
            continue
        if table in COVERED and "replica" not in held:
            found.append(f"{table} before its replica")
        if table == "replica":
            ids = set(_ID.findall(sql))
            logged = any(one.startswith("log") for one in held)
            if logged and not whole and not (ids and ids <= replicas):
                found.append("a further replica after a log")
            replicas |= ids
            whole = whole or "project_id" in sql.partition("WHERE")[2]
        if name not in held and name in _RANKED:
            later = [one for one in held if one in _RANKED and _RANKED[one] > _RANKED[name]]
            found += [f"{name} after {one}" for one in later]
        held.add(name)
    return found


_RANKED = RANKS | {f"log of a {kind}": rank for kind, rank in LOGS.items()}


def _table_of(sql: str) -> str:
    match = _LOCKING.match(sql) or _UPDATE.match(sql)
    return match[1] if match else ""


def _log_of(sql: str) -> str:
    match = _LOG.search(sql)
    return match[1] if match else ""
