"""Ports, records, locks, progress, and the demonstration's lines."""

import io
import os
import socket
import subprocess
import sys

import psutil
import pytest

from controlplane.processes.demo_report import clock, gain_line, megabytes, summary_lines
from controlplane.processes.errors import AlreadyRunning, PortTaken
from controlplane.processes.ports import free_port, port_is_free
from controlplane.processes.progress import Progress
from controlplane.processes.records import exclusive, process_alive, record_read, record_write, write_atomically
from controlplane.processes.stack import choose_web_port
from controlplane.selectors.run_summary import ClusterShipping, Gain, RunSummary
from controlplane.selectors.statistics import Interval


def test_a_port_in_use_is_seen_and_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
        free = free_port()
        assert free_port(candidates=[port, free]) == free
        with pytest.raises(PortTaken, match="no free loopback port"):
            free_port(candidates=[port])
        with pytest.raises(PortTaken, match=f"port {port} is in use.*--port"):
            choose_web_port(port)


def test_ports_already_given_away_are_not_given_again():
    port = free_port()
    other = free_port(candidates=[port, port + 1, port + 2], taken={port})
    assert other != port


def test_a_record_is_of_one_process_only(tmp_path):
    path = tmp_path / "it.json"
    record_write(path, os.getpid())
    found = record_read(path, name="")
    assert found is not None
    assert found.pid == os.getpid()
    assert record_read(path, name="postgres") is None
    assert process_alive(os.getpid(), born=psutil.Process().create_time() - 60, name="") is None
    path.write_text("{")
    assert record_read(path, name="") is None


def test_a_zombie_is_not_alive(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    record_write(tmp_path / "z", child.pid)
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert record_read(tmp_path / "z", name="python") is None
    child.wait()


def test_files_are_whole_and_private(tmp_path):
    path = tmp_path / "secret"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_refuses_the_second_and_is_free_again(tmp_path):
    path = tmp_path / "lock"
    first = exclusive(path, timeout_s=0, message="free")
    second = exclusive(path, timeout_s=0.1, message="taken")
    with first, pytest.raises(AlreadyRunning, match="taken"), second:
        pass
    with exclusive(path, timeout_s=0, message="taken"):
        pass


def test_progress_writes_over_on_a_terminal_and_seldom_into_a_file():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, file = Terminal(), io.StringIO()
    for output in (terminal, file):
        progress = Progress(output)
        progress.show("one")
        progress.show("two")
        progress.clear()
    assert terminal.getvalue() == "\r\033[Kone\r\033[Ktwo\r\033[K"
    assert file.getvalue() == "  … one\n"


def gain(low, high):
    return Gain(before=0.2, after=0.8, difference=Interval(0.6, low, high, 100))


def cluster(at_head=True):
    return ClusterShipping(
        slug="west",
        region="us-west",
        versions=18,
        fetched_bytes=10_000_000,
        full_bytes=4_000_000_000,
        pauses_s=(0.02, 0.03, 0.2),
        at_head=at_head,
    )


def test_the_summary_says_what_came_of_it():
    summary = RunSummary(steps=18, window=5, reward=gain(0.5, 0.7), heldout=gain(0.4, 0.6), clusters=(cluster(),))
    text = "\n".join(summary_lines(summary, elapsed_s=123))
    assert summary.gained
    assert "18 steps in 2:03" in text
    assert "reward     first 5 → last 5 steps: 0.20 → 0.80, difference +0.60 [+0.50, +0.70]" in text
    assert "18 versions, 10.0 MB instead of 4.00 GB (400 times less), pauses 30 ms median, 200 ms longest" in text
    assert "every replica's root equals the trainer's" in text
    assert "it learned" in text


def test_a_gain_needs_both_intervals_above_zero():
    for reward, heldout in (
        (gain(-0.1, 0.2), gain(0.1, 0.2)),
        (gain(0.1, 0.2), gain(-0.1, 0.2)),
        (gain(0.1, 0.2), None),
    ):
        summary = RunSummary(steps=2, window=1, reward=reward, heldout=heldout, clusters=(cluster(at_head=False),))
        assert not summary.gained
        text = "\n".join(summary_lines(summary, elapsed_s=1))
        assert "no gain shown" in text
        assert "NOT every replica's root" in text
    assert gain_line("held-out", "before → after", None) == "held-out   before → after: too little data"


def test_sizes_and_times_as_people_read_them():
    assert (megabytes(1_500_000), megabytes(2_500_000_000)) == ("1.5 MB", "2.50 GB")
    assert (clock(59.9), clock(600)) == ("0:59", "10:00")
