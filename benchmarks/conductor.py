"""What the control plane itself costs: the conductor's looks, and everything a group needs on its way to a step.

A real PostgreSQL with durable commits and a real Valkey, in a state folder of the benchmark's own. Workers are
simulated: they make the same service calls in the same order, with no engine or trainer behind them.

- `tick_p99_ms`: one look at a run, over whole runs (`tick_p50_ms` beside it);
- `groups_per_s`: groups of eight attempts from admission to a published step, one process doing everything;
- `cost_10000_vs_100`: an idle look at a run with 10,000 consumed groups ÷ at one with 100, in turn;
- `share_of_step`: the conductor's processor time in one step of the demonstration ÷ that step's length
  (`step_s`, measured near idle on two cores), ticks while nothing happens included.

Floors of the machine: `select_1_ms`, `commit_ms`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Progress, interleaved_medians, rounds

STEP_S = 10.6
GROUPS_A_STEP = 4
_STATE = Path(f"var/bench-{os.getpid()}").resolve()


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """See the module's text."""
    with database(progress):
        from benchmarks import conductor_rows as rows
        from controlplane.conductor.duties import look_every_s

        floor = floors()
        progress("running whole runs")
        steps = 4 if quick else 25
        lives = [rows.live(steps=steps, prompts=GROUPS_A_STEP) for _ in range(rounds(quick=quick))]
        ticks = sorted(tick for life in lives for tick in life.ticks_s)
        progress(f"{len(ticks)} looks; making long histories")
        small, large = rows.history(groups=100), rows.history(groups=10_000)
        rows.analyze()
        looks = {"small": lambda: rows.look(small), "large": lambda: rows.look(large)}
        costs = interleaved_medians(looks, repeats=60 if quick else 200)
        idle_cpu_s = _cpu_seconds(looks["small"], times=50)
        decisions_cpu_s = statistics.median(life.conductor_cpu_s / steps for life in lives)
        per_step_s = decisions_cpu_s + idle_cpu_s * STEP_S / look_every_s()
        return {
            "tick_p99_ms": 1000 * ticks[int(len(ticks) * 0.99)],
            "tick_p50_ms": 1000 * statistics.median(ticks),
            "groups_per_s": statistics.median(life.groups / life.seconds for life in lives),
            "cost_10000_vs_100": costs["large"] / costs["small"],
            "idle_look_ms": 1000 * costs["small"],
            "share_of_step": per_step_s / STEP_S,
            "step_s": STEP_S,
            **floor,
        }


@contextmanager
def database(progress: Progress) -> Iterator[None]:
    """Django over services of the benchmark's own, with an empty migrated database; all gone at the end."""
    from controlplane.processes.services import services_start, services_stop

    progress("starting PostgreSQL and Valkey")
    urls = services_start(_STATE, say=progress)
    settings = {
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "SLIPWAY_STATE": str(_STATE),
        "DATABASE_URL": urls.database_url,
        "REDIS_URL": urls.redis_url,
    }
    os.environ.update(settings)  # noqa: TID251  # before Django reads its settings, once
    import django

    django.setup()
    from django.db import connection

    try:
        connection.creation.create_test_db(verbosity=0, autoclobber=True)
        yield
    finally:
        connection.close()
        services_stop(_STATE)
        shutil.rmtree(_STATE, ignore_errors=True)


def floors() -> dict[str, object]:
    """What one round trip and one durable commit cost here."""
    from django.db import connection

    def select() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")

    def commit() -> None:
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS floor (n int)")
            cursor.execute("INSERT INTO floor VALUES (1)")

    medians = interleaved_medians({"select_1_ms": select, "commit_ms": commit}, repeats=50)
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE floor")
    return {name: 1000 * seconds for name, seconds in medians.items()}


def _cpu_seconds(action: Callable[[], object], *, times: int) -> float:
    """Processor seconds of this process for one action, PostgreSQL's not included."""
    started = time.process_time()
    for _ in range(times):
        action()
    return (time.process_time() - started) / times
