"""Publishers and replicas killed with SIGKILL at random bytes of what they send and fetch, over a real S3 protocol."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from s3_server import Request, S3Server, running_s3
from transfer_child import weights

from rl_core.delta import read_manifest, weights_root
from rl_core.store import open_store

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

KILLS = 100


class Children:
    """Processes that are forked, and killed when a byte of segments goes through the proxy."""

    def __init__(self, s3: S3Server) -> None:
        command = [sys.executable, str(Path(__file__).with_name("transfer_child.py"))]
        environment = {**os.environ, **s3.environment()}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._s3 = s3
        self._lock = threading.Lock()
        self._pid = 0
        self._known = threading.Event()
        self._kill_at: float = 0
        self._moved = 0
        self.moved_in_all = 0
        self.counted = {"PUT", "GET"}
        s3.moved = self._watch

    def run(self, *, kill_at: float, **command: Any) -> dict[str, Any]:
        """Run one; `{"status": …, "said": …}`."""
        assert self._process.stdin is not None
        self._known.clear()
        self._kill_at, self._moved = kill_at, 0
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        self._pid = self._line()["pid"]
        self._known.set()
        return self._line()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def _watch(self, request: Request, count: int) -> None:
        if "/segments/" not in request.path or request.method not in self.counted:
            return
        self._known.wait(30)
        with self._lock:
            due = self._moved <= self._kill_at < self._moved + count
            self._moved += count
            self.moved_in_all += count
        if due:
            os.kill(self._pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["publish", "receive", "ahead"])
def test_killed_at_a_hundred_random_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    with running_s3() as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        children = Children(s3)
        generator = random.Random(20261130)
        kills = transfers = 0
        while kills < KILLS:
            transfers += 1
            killed = _until_it_is_done(children, s3.url(), end, tmp_path / f"spool-{transfers}", transfers, generator)
            kills += killed
        children.close()
    print(f"{end}: {kills} kills over {transfers} transfers")  # noqa: T201 (drills tell)


def _until_it_is_done(children: Children, url: str, end: str, spool: Path, seed: int, generator: random.Random) -> int:
    """One version's transfer, killed as often as chance has it; how often that was."""
    command: dict[str, Any] = {"url": url, "seed": seed, "spool": str(spool)}
    root = weights_root(weights(seed)[1])
    if end != "publish":
        children.counted = {"PUT"}
        assert children.run(do="publish", kill_at=float("inf"), **command)["said"] == {"root": root}
    children.counted = {"PUT"} if end == "publish" else {"GET"}  # a later attempt reads what one before it has put
    before, kills, left = children.moved_in_all, 0, 250_000.0
    while True:
        if end == "publish":
            command["fence"] = kills // 2  # an attempt is run again, and then there is a new one
        answer = children.run(do=end, kill_at=generator.uniform(0, left), **command)
        if answer["status"] == 0:
            break
        assert answer["status"] == signal.SIGKILL
        kills += 1
        left *= 0.9
    assert answer["said"] == {"root": root}
    manifest = f"lineages/lin/0-1/{command.get('fence', 0)}/manifest.json"
    segments = read_manifest(open_store(url), manifest).segments
    total, largest = sum(segment.size for segment in segments), max(segment.size for segment in segments)
    assert len(segments) > 8
    assert total <= children.moved_in_all - before <= total + kills * largest
    stands = {info.key for info in open_store(url).list("lineages")}
    earlier = {key for key in stands if not key.startswith(manifest.removesuffix("manifest.json"))}
    assert stands - earlier == {manifest, *(one.key for one in segments)}
    names = {one.key.rpartition("/")[2] for one in segments}
    assert {key.rpartition("/")[2] for key in earlier} <= names
    return kills
