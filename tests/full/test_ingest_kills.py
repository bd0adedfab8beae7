"""Feedback survives fifty random kills of web, workers, broker and PostgreSQL, with events offered all the while."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from ingest_drill import SETUP, Drill, kill_at_random
from machine_rig import Machine

from controlplane.processes.ports import free_port

KILLS, PER_S, DRAIN_S = 50, 60.0, 600.0
EVENTS_BETWEEN = (60, 300)
pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def machine():
    state = Path(tempfile.mkdtemp(prefix="slipway-ingest-"))
    running = Machine(state, port=free_port())
    try:
        assert running.manage("services", "start").returncode == 0
        assert running.manage("migrate").returncode == 0
        yield running
    finally:
        running.close()
    shutil.rmtree(state)


@pytest.fixture(scope="module")
def drill(machine):
    """The drill, over: everything was killed, offering has ended, and what could be drained is."""
    known = json.loads(machine.python(SETUP))
    assert machine.manage("services", "stop").returncode == 0
    machine.start()
    drill = Drill(machine, known["key"], known["lane"], known["answers"])
    started = time.monotonic()
    drill.begin(per_s=PER_S, seed=7)
    try:
        kill_at_random(drill, kills=KILLS, seed=11, events_between=EVENTS_BETWEEN)
        lasted_s, offered = time.monotonic() - started, len(drill.offered)
        drill.end_offering()
        machine.until(drill.drained, what=f"all is acknowledged ({drill.refused})", timeout_s=DRAIN_S)
    finally:
        said = drill.close()
    assert said.splitlines()[-1:] == ["recorded"]  # above it are warnings of what was killed
    sys.stderr.write(
        f"{sum(drill.killed.values())} kills in {lasted_s:.0f} s: {dict(drill.killed)}\n"
        f"{len(drill.offered)} events offered, {offered / lasted_s:.0f} a second while kills went on; "
        f"refusals on the way: {dict(drill.refused)}\n"
    )
    return drill


def test_everything_was_killed(drill):
    kinds = {"web", "conductor", "services", "postgres", "valkey"} | {
        f"worker-{queue}" for queue in ("control", "rollout", "train", "transfer", "score")
    }
    assert kinds <= set(drill.killed)
    assert sum(drill.killed.values()) == KILLS
    assert min(drill.killed[kind] for kind in kinds) >= 2


def test_no_acknowledged_event_is_lost_and_none_is_there_twice(machine, drill):
    receipts = machine.rows("SELECT event_id, feedback_id::text FROM controlplane_feedbackreceipt")
    feedback = machine.rows("SELECT id::text, value FROM controlplane_feedback")
    assert len({event_id for event_id, _ in receipts}) == len(receipts)
    assert {event_id for event_id, _ in receipts} == set(drill.acknowledged) == set(drill.offered)
    assert sorted(key for _, key in receipts) == sorted(key for key, _ in feedback)
    values = dict(feedback)
    assert {event_id: values[key] for event_id, key in receipts} == {
        event_id: event["value"] for event_id, event in drill.offered.items()
    }


def test_every_event_finds_its_answer(machine, drill):
    def waiting() -> int:
        return machine.rows("SELECT count(*) FROM controlplane_feedback WHERE state <> 'joined'")[0][0]

    machine.until(lambda: waiting() == 0, what="all is joined", timeout_s=DRAIN_S)
    wrong = "SELECT count(*) FROM controlplane_feedback WHERE generation_id::text <> target_id"
    assert machine.rows(wrong) == [(0,)]


def test_the_log_tells_of_each_event_once_and_has_no_gap(machine, drill):
    gaps = (
        "SELECT t.name FROM controlplane_topic t LEFT JOIN controlplane_event e ON e.topic = t.name "
        "GROUP BY t.name, t.seq HAVING count(e.id) <> t.seq OR max(e.seq) <> t.seq"
    )
    assert machine.rows(gaps) == []
    told = "SELECT sum(coalesce((data ->> 'count')::int, 1)) FROM controlplane_event WHERE type = 'feedback.received'"
    assert machine.rows(told) == [(len(drill.offered),)]


def test_repeats_were_counted(machine, drill):
    [(repeats,)] = machine.rows("SELECT sum(repeats) FROM controlplane_feedbackreceipt")
    assert repeats > 0
