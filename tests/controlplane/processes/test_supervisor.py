"""The supervisor against real processes: restarts, growing pauses, leftovers, and a clean end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from controlplane.processes.output import LineStream
from controlplane.processes.supervisor import describe_exit, end_tree, next_pause_s, supervised

SCRIPT = """
import asyncio, sys
from pathlib import Path
import django
django.setup()
from controlplane.processes.specs import ProcessSpec
from controlplane.processes.supervisor import Supervisor

def spec(name, code, **options):
    return ProcessSpec(name=name, argv=(sys.executable, "-u", "-c", code), **options)

folder = Path(sys.argv[1])
sleep = "import time; time.sleep(99)"
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True); {sleep}"
specs = [
    spec("steady", "import os, time; print('steady', os.getpid()); time.sleep(99)"),
    spec("crash", "import sys; print('boom', file=sys.stderr); sys.exit(7)"),
    spec("deaf", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)", grace_s=1),
    spec("parent", parent),
    *(spec(f"twin-{n}", f"import os, time; print('twin', {n}, os.getpid()); time.sleep(99)") for n in range(6)),
    spec("bare", "import os, time; print(sorted(os.environ)); time.sleep(99)", bare=True),
]
later = [[spec("later", "import time; print('later is here'); time.sleep(99)")]]
supervisor = Supervisor(folder, logs=folder / "logs", working_dir=folder, terminal=sys.stdout, say=print)
asyncio.run(supervisor.run(specs, started=lambda: print("STARTED", flush=True),
                           poll=lambda: later.pop() if later else [], poll_s=1))
print("ENDED", flush=True)
"""


class Running:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "out.txt"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", SCRIPT, str(folder)],
                stdout=output,
                stderr=output,
                env={**os.environ, "SECRET_WORD": "hidden"},
            )

    def until(self, word: str, *, timeout_s: float = 30) -> str:
        deadline = time.monotonic() + timeout_s
        while word not in (text := self.log.read_text()):
            assert time.monotonic() < deadline, f"no {word!r} in:\n{text}"
            time.sleep(0.05)
        return text

    def pid(self, name: str) -> int:
        deadline = time.monotonic() + 10
        while name not in (records := supervised(self.folder)):
            assert time.monotonic() < deadline, f"{name} is not recorded"
            time.sleep(0.05)
        return records[name].pid

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        tree = self.tree() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        end_tree(tree, patience_s=1)


@pytest.fixture
def running(tmp_path):
    started = Running(tmp_path)
    yield started
    started.close()


def test_life_of_a_supervisor(running):
    text = running.until("STARTED")
    running.until("later is here")
    running.until("boom")
    text = running.until("crash           │ ended with exit code 7")
    assert "steady          │ steady" in text

    first = running.pid("steady")
    os.kill(first, signal.SIGKILL)
    running.until("steady          │ ended with signal SIGKILL")
    deadline = time.monotonic() + 10
    while running.pid("steady") == first and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running.pid("steady") != first
    assert psutil.pid_exists(running.pid("steady"))

    assert "SECRET_WORD" not in (running.folder / "logs" / "bare.log").read_text()
    assert "boom" in (running.folder / "logs" / "crash.log").read_text()

    tree = running.tree()
    assert len(tree) >= 6
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(30) == 0
    running.until("ENDED")
    assert [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert supervised(running.folder) == {}


def test_processes_killed_together_all_come_back_and_are_heard(running):
    running.until("STARTED")
    names = [f"twin-{n}" for n in range(6)]
    for _ in range(3):
        before = {name: running.pid(name) for name in names}
        for name in names:
            running.until(f"twin {name[-1]} {before[name]}\n")
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        for name in names:
            deadline = time.monotonic() + 20
            while running.pid(name) == before[name]:
                assert time.monotonic() < deadline, f"{name} did not come back"
                time.sleep(0.05)
            running.until(f"twin {name[-1]} {running.pid(name)}\n")
    alive = [process for process in running.tree() if process.status() != psutil.STATUS_ZOMBIE]
    living = [process for process in alive if "twin" in " ".join(process.cmdline())]
    assert len(living) == len(names), "nothing runs twice"
    assert "Traceback" not in running.log.read_text()


def test_what_a_killed_supervisor_left_is_ended_by_the_next(tmp_path):
    first = Running(tmp_path)
    try:
        first.until("STARTED")
        orphan = psutil.Process(first.pid("steady"))
        left = first.tree()
        first.process.kill()
        first.process.wait()
        assert orphan.is_running()
        second = Running(tmp_path)
        try:
            second.until("ended what an earlier run left")
            second.until("STARTED")
            assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        finally:
            second.close()
    finally:
        end_tree(left, patience_s=1)
        first.close()


def test_the_pause_doubles_after_short_lives_and_ends_after_a_long_one():
    pauses, pause = [], 0.25
    for _ in range(9):
        pause = next_pause_s(pause, lived_s=1)
        pauses.append(pause)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert next_pause_s(30, lived_s=31) == 0.5


def test_exits_in_words():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(None) == "an unknown status"


def test_lines_are_whole_and_escaped_bytes_do_no_harm(tmp_path, capsys):
    stream = LineStream("web", folder=tmp_path, terminal=sys.stdout)
    stream({"data": b"one\ntw"})
    stream({"data": b"o\n\xff\nlast"})
    stream.close()
    assert capsys.readouterr().out.splitlines() == [f"{'web':<16}│ {line}" for line in ("one", "two", "�", "last")]
    assert (tmp_path / "web.log").read_text().splitlines() == ["one", "two", "�", "last"]
