"""What `manage.py up` runs: one spec for each process, nothing started here."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings

from controlplane.states import Queue
from rl_core.sandbox import postgres

# How many processes a worker kind forks. Rollouts wait on engines most of the time; training is one at a time.
CONCURRENCY = {Queue.CONTROL: 1, Queue.ROLLOUT: 2, Queue.TRAIN: 1, Queue.TRANSFER: 2, Queue.SCORE: 1}

# Threads of numerical libraries that wait actively slow everything else on a small machine many times over.
LEAN = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
# An engine reads the store, whose credentials may stand in the environment; these are none of its business.
_KEPT_FROM_ENGINES = ("SECRET_KEY", "DATABASE_URL", "REDIS_URL", "BROKER_URL")
# numpy asks for huge pages, with which the engine's key-value table would be resident as a whole, used or not.
ENGINE_ENV = {**LEAN, **dict.fromkeys(_KEPT_FROM_ENGINES, ""), "NUMPY_MADVISE_HUGEPAGE": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep running. `bare` gives it nothing of our environment but PATH: no credentials."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=lambda: dict(LEAN))
    bare: bool = False
    stop_signal: int = signal.SIGTERM
    grace_s: float = 8.0
    priority: int = 0  # higher starts earlier


def web_spec(*, port: int) -> ProcessSpec:
    """The web process."""
    return ProcessSpec(
        name="web",
        argv=(
            *_python("-m", "uvicorn", "controlplane.asgi:application", "--host", "127.0.0.1", "--port", str(port)),
            *("--no-access-log", "--timeout-graceful-shutdown", "3", "--ws-max-size", "65536"),
        ),
        priority=50,
    )


def conductor_spec() -> ProcessSpec:
    """The conductor: ticks, dispatcher and sweeper."""
    return ProcessSpec(name="conductor", argv=_manage("conductor"), priority=40)


def keeper_spec() -> ProcessSpec:
    """Starts the embedded services again when they die."""
    return ProcessSpec(name="services", argv=_manage("services", "keep"), priority=100)


def sandboxd_spec(socket: Path) -> ProcessSpec:
    """The only process that starts worlds. It gets no credentials of ours."""
    mounts = [word for name, path in postgres.mounts().items() for word in ("--mount", f"{name}={path}")]
    places = ("--socket", str(socket), "--state", str(settings.STATE_DIR / "sandboxd"))
    return ProcessSpec(name="sandboxd", argv=_python("-m", "rl_core.sandbox", *places, *mounts), bare=True, priority=60)


def worker_spec(queue: Queue, *, public_url: str) -> ProcessSpec:
    """The Celery worker of one queue. `public_url` is where remote environments reach the web process."""
    count = CONCURRENCY[queue]
    pool = ("--pool", "prefork", "--concurrency", str(count))
    return ProcessSpec(
        name=f"worker-{queue.value}",
        argv=(
            *_python("-m", "celery", "-A", "controlplane.celery", "worker", "-Q", queue.value),
            *("-n", f"{queue.value}@%h", *pool, "--loglevel", settings.LOG_LEVEL),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ),
        # Celery would load every page and API view to check them, in each worker.
        env={**LEAN, "CELERY_SKIP_CHECKS": "1", "PUBLIC_URL": public_url},
        # Celery's bounded stop: running tasks get a few seconds and are then given back.
        stop_signal=signal.SIGQUIT,
        grace_s=12.0,
        priority=20,
    )


def _python(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-u", *words)


def _manage(*words: str) -> tuple[str, ...]:
    return _python(str(settings.BASE_DIR / "manage.py"), *words)
