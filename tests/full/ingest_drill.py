"""Feedback at a steady rate while processes are killed: what is offered, what is acknowledged, what is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
from machine_rig import ROOT, Machine

ACKNOWLEDGED = {200, 201, 202}
SENDERS = 4
MOST_AT_ONCE = 40

# A lane whose model is nowhere, so that no engine runs; a key; and the answers that are there already.
SETUP = """
import json
from tests.lane_rows import ACTOR, lane_world
from controlplane.models import Cluster
from controlplane.services.tenancy import api_key_create
from controlplane.states import Scope
from rl_core.store import open_store
from django.conf import settings
world = lane_world()
store = open_store(settings.STORE_URL)
answers = [str(world.generate(store).id) for _ in range(200)]
_, key = api_key_create(project=world.project, name="app", scopes=[Scope.FEEDBACK], actor=ACTOR)
print(json.dumps({"key": key, "project": str(world.project.id), "lane": str(world.lane.id), "answers": answers}))
"""
# Writes answers down one by one, each as often as it takes.
RECORDER = """
import sys, time, uuid
from django.conf import settings
from django.db import Error, connection
from psycopg_pool import PoolTimeout
from controlplane.models import Generation, Lane
from tests.lane_rows import LaneWorld
from rl_core.store import open_store
lane = Lane.objects.select_related("promoted_version", "project").get(pk=sys.argv[1])
world = LaneWorld(project=lane.project, model=None, cluster=None, replica=None, lane=lane)
store = open_store(settings.STORE_URL)
for line in sys.stdin:
    while True:
        try:
            if not Generation.objects.filter(id=line.strip()).exists():
                world.generate(store, generation_id=uuid.UUID(line.strip()))
            break
        except (Error, PoolTimeout):
            connection.close()
            time.sleep(0.2)
print("recorded")
"""


@dataclass
class Drill:
    """What was offered and what was acknowledged. Senders try each event until it is."""

    machine: Machine
    key: str
    lane: str
    answers: list[str]
    offered: dict[str, dict[str, Any]] = field(default_factory=dict)
    acknowledged: dict[str, float] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    _waiting: deque[dict[str, Any]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _recorder: subprocess.Popen[str] | None = None

    def begin(self, *, per_s: float, seed: int) -> None:
        """Offer events, about answers that are there and about some that are written down only around now."""
        self._recorder = subprocess.Popen(
            [sys.executable, "-c", f"import django; django.setup()\n{RECORDER}", self.lane],
            cwd=ROOT,
            env={**self.machine.environment(), "DJANGO_SETTINGS_MODULE": "controlplane.settings"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._run(self._offer, per_s, random.Random(seed))
        for number in range(SENDERS):
            self._run(self._send, random.Random(seed + number))

    def offer_further(self, events: int) -> None:
        """Wait until so many further events are offered."""
        due = len(self.offered) + events
        self.machine.until(lambda: len(self.offered) >= due, what=f"{events} further events", timeout_s=600)

    def end_offering(self) -> None:
        """No further events; those that wait are still sent."""
        self._over.set()

    def drained(self) -> bool:
        """Whether all that was offered is acknowledged."""
        return len(self.acknowledged) == len(self.offered)

    def close(self) -> str:
        """End the threads and the recorder; what the recorder said."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        assert self._recorder is not None
        said, _ = self._recorder.communicate(timeout=600)
        return said

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _offer(self, per_s: float, drawn: random.Random) -> None:
        assert self._recorder is not None
        assert self._recorder.stdin is not None
        started, count = time.monotonic(), 0
        while not self._over.is_set():
            if drawn.random() < 0.1:  # an answer of which users speak before, while and after it is written down
                fresh = str(uuid.uuid4())
                self._recorder.stdin.write(fresh + "\n")
                self._recorder.stdin.flush()
                self.answers.append(fresh)
            event = {
                "event_id": str(uuid.uuid4()),
                "signal": "thumbs",
                "target": {"kind": "generation", "id": drawn.choice(self.answers[-300:])},
                "value": drawn.random() < 0.5,
                "occurred_at": datetime.now(UTC).isoformat(),
                "actor": {"hash": f"user-{drawn.randrange(50)}"},
                "consent": "train",
            }
            with self._lock:
                self.offered[event["event_id"]] = event
                self._waiting.append(event)
            count += 1
            time.sleep(max(0.0, started + count / per_s - time.monotonic()))

    def _send(self, drawn: random.Random) -> None:
        url = f"http://127.0.0.1:{self.machine.port}/api/v1/feedback"
        headers = {"Authorization": f"Bearer {self.key}"}
        with httpx.Client(headers=headers, timeout=10, trust_env=False) as web:
            while not (self._over.is_set() and self.drained()):
                with self._lock:
                    taken = [
                        self._waiting.popleft() for _ in range(min(len(self._waiting), drawn.randint(1, MOST_AT_ONCE)))
                    ]
                if not taken:
                    time.sleep(0.02)
                    continue
                done = self._post(web, url, taken)
                with self._lock:
                    self._waiting.extend(event for event in taken if event["event_id"] not in done)
                    self.acknowledged.update(dict.fromkeys(done, time.monotonic()))
                    if done and drawn.random() < 0.1:  # a sender whose own disk was slow sends again
                        self._waiting.append(drawn.choice(taken))
                if not done:
                    time.sleep(drawn.random())

    def _post(self, web: httpx.Client, url: str, events: list[dict[str, Any]]) -> set[str]:
        """The ids that are acknowledged."""
        try:
            if len(events) == 1:
                answer = web.post(url, json=events[0])
                if answer.status_code in ACKNOWLEDGED:
                    return {events[0]["event_id"]}
            else:
                answer = web.post(f"{url}/batch", json={"items": events})
                if answer.status_code == 207:
                    told = answer.json()
                    self.refused.update(error["code"] for error in told["errors"])
                    return {one["event_id"] for one in told["accepted"]}
            self.refused[str(answer.status_code)] += 1
        except (httpx.TransportError, json.JSONDecodeError) as error:
            self.refused[type(error).__name__] += 1
        return set()


def kill_at_random(drill: Drill, *, kills: int, seed: int, events_between: tuple[int, int]) -> None:
    """`kill -9` of whatever runs, so many times, each kind among them, with so many events offered after each."""
    machine, drawn = drill.machine, random.Random(seed)
    while sum(drill.killed.values()) < kills:
        victims = victims_of(machine)
        seldom = [kind for kind in victims if drill.killed[kind] == min(drill.killed[name] for name in victims)]
        kind = drawn.choice(seldom if drawn.random() < 0.5 else list(victims))
        try:
            os.kill(victims[kind], signal.SIGKILL)
        except ProcessLookupError:
            pass  # it is being started again just now
        else:
            drill.killed[kind] += 1
        drill.offer_further(drawn.randint(*events_between))


def victims_of(machine: Machine) -> dict[str, int]:
    """What may be killed, by name: web, conductor, workers, the services' keeper, the broker, PostgreSQL."""
    found = {name: pid for name, pid in machine.processes().items() if name != "sandboxd"}
    with contextlib.suppress(OSError, msgspec.DecodeError):  # their records are being written just now
        found |= machine.services()
    return {name: pid for name, pid in found.items() if os.path.exists(f"/proc/{pid}")}
