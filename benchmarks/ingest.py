"""Feedback on its way in: the web process over a PostgreSQL with durable commits, against bare INSERTs of its rows.

Batches of 500 events over two connections at once, in turn with psycopg inserting rows of the same content into the
same tables, in batches of the same size, over as many connections, with one COMMIT a batch. Every event is about an
answer that is there, is checked, deduplicated, limited and joined, and is durable before it is answered; the rows are
counted in the database at the end.

- `batch_vs_bare`: events a second by the batch endpoint ÷ by the faster of two bare ways (`executemany`, and one
  INSERT over arrays a table), medians of rounds;
- `batch_per_s`, `bare_per_s`: both sides, events a second; `batch_p50_ms`, `batch_p99_ms`: a batch's time;
- `single_per_s`, `single_p50_ms`, `single_p99_ms`: one event a request over eight connections at once;
  `bare_single_per_s`: one event a transaction over eight connections, bare.

Floors of the machine: `select_1_ms`, `commit_ms`.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import psycopg

from benchmarks.conductor import database, floors
from benchmarks.measure import Progress, rounds
from benchmarks.web import database_url, free_ports, web_process

if TYPE_CHECKING:
    from benchmarks.ingest_rows import Intake

BATCH: Final = 500
CONNECTIONS: Final = 2
SINGLES: Final = 8
GENERATIONS: Final = 20_000


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """See the module's text."""
    with database(progress):
        from benchmarks import ingest_rows as rows

        floor = floors()
        into = rows.intake(generations=GENERATIONS)
        [port] = free_ports(1)
        with web_process(port):
            measured = _Measured(into, port)
            progress("batches, and bare inserts in turn")
            batches = measured.batches(rounds=rounds(quick=quick) + 2, each=4 if quick else 12)
            progress("single events")
            singles = measured.singles(rounds=rounds(quick=quick), each=40 if quick else 150)
            sent = measured.sent
        found = rows.stored(into)
        if found != (sent, sent):
            raise RuntimeError(f"{sent} events were acknowledged; the database has {found}")
    return {**batches, **singles, "events": sent, **floor}


class _Measured:
    """Sides of the comparison over connections that are kept."""

    def __init__(self, into: Intake, port: int) -> None:
        self._into = into
        self._web = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(SINGLES)]
        self._bare = [psycopg.connect(database_url()) for _ in range(SINGLES)]
        self._pool = ThreadPoolExecutor(SINGLES)
        self._seed = 0
        self.sent = 0

    def batches(self, *, rounds: int, each: int) -> dict[str, object]:
        """Rounds in turn: `each` batches on each connection, by the endpoint and by the bare ways."""
        from benchmarks import ingest_rows as rows

        rates: dict[str, list[float]] = {"batch": [], "executemany": [], "unnest": []}
        times: list[float] = []
        bare = {"executemany": rows.bare_executemany, "unnest": rows.bare_unnest}
        for number in range(rounds):
            bodies = [[self._body(BATCH) for _ in range(each)] for _ in range(CONNECTIONS)]
            found, seconds = self._at_once(self._post_batches, list(zip(self._web, bodies, strict=False)))
            events = BATCH * each * CONNECTIONS
            if number >= 2:  # the first rounds warm caches and connections
                rates["batch"].append(events / seconds)
                times += [one for some in found for one in some]
            for name, insert in bare.items():
                work = [[rows.bare_rows(self._into, self._events(BATCH)) for _ in range(each)] for _ in bodies]
                jobs = [(connection, some, insert) for connection, some in zip(self._bare, work, strict=False)]
                _, seconds = self._at_once(_insert_all, jobs)
                if number >= 2:
                    rates[name].append(events / seconds)
        medians = {name: statistics.median(some) for name, some in rates.items()}
        fastest = max(medians["executemany"], medians["unnest"])
        return {
            "batch_vs_bare": medians["batch"] / fastest,
            "batch_per_s": medians["batch"],
            "bare_per_s": fastest,
            "bare_executemany_per_s": medians["executemany"],
            "bare_unnest_per_s": medians["unnest"],
            **_quantiles("batch", times),
        }

    def singles(self, *, rounds: int, each: int) -> dict[str, object]:
        """Rounds in turn: `each` single events on each of eight connections, by the endpoint and bare."""
        from benchmarks import ingest_rows as rows

        rates: dict[str, list[float]] = {"single": [], "bare": []}
        times: list[float] = []
        for number in range(rounds + 1):
            events = [[json.dumps(event).encode() for event in self._events(each)] for _ in self._web]
            found, seconds = self._at_once(
                _post_singles, [(c, self._into.key, e) for c, e in zip(self._web, events, strict=True)]
            )
            work = [[rows.bare_rows(self._into, self._events(1)) for _ in range(each)] for _ in self._bare]
            jobs = [(c, some, rows.bare_executemany) for c, some in zip(self._bare, work, strict=True)]
            _, bare_seconds = self._at_once(_insert_all, jobs)
            if number:
                rates["single"].append(each * SINGLES / seconds)
                rates["bare"].append(each * SINGLES / bare_seconds)
                times += [one for some in found for one in some]
        return {
            "single_per_s": statistics.median(rates["single"]),
            "bare_single_per_s": statistics.median(rates["bare"]),
            **_quantiles("single", times),
        }

    def _events(self, count: int) -> list[dict[str, Any]]:
        from benchmarks import ingest_rows as rows

        self._seed += 1
        self.sent += count
        return rows.events(self._into, count, seed=self._seed)

    def _body(self, count: int) -> bytes:
        return json.dumps({"items": self._events(count)}).encode()

    def _post_batches(self, connection: http.client.HTTPConnection, bodies: Sequence[bytes]) -> list[float]:
        times = []
        for body in bodies:
            started = time.perf_counter()
            status, answer = _post(connection, "/api/v1/feedback/batch", self._into.key, body)
            times.append(time.perf_counter() - started)
            if status != 207 or b'"errors":[]' not in answer or answer.count(b'"status":201') != BATCH:
                raise RuntimeError(f"{status}: {answer[:500]!r}")
        return times

    def _at_once(self, work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> tuple[list[Any], float]:
        started = time.perf_counter()
        found = list(self._pool.map(lambda job: work(*job), jobs))
        return found, time.perf_counter() - started


def _insert_all(connection: psycopg.Connection[Any], work: Sequence[Any], insert: Callable[..., None]) -> None:
    for rows in work:
        insert(connection, rows)


def _post_singles(connection: http.client.HTTPConnection, key: str, bodies: Sequence[bytes]) -> list[float]:
    times = []
    for body in bodies:
        started = time.perf_counter()
        status, answer = _post(connection, "/api/v1/feedback", key, body)
        times.append(time.perf_counter() - started)
        if status != 201:
            raise RuntimeError(f"{status}: {answer[:500]!r}")
    return times


def _post(connection: http.client.HTTPConnection, path: str, key: str, body: bytes) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", path, body=body, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def _quantiles(name: str, seconds: Sequence[float]) -> dict[str, object]:
    ordered = sorted(seconds)
    return {
        f"{name}_p50_ms": 1000 * statistics.median(ordered),
        f"{name}_p99_ms": 1000 * ordered[int(len(ordered) * 0.99)],
    }
