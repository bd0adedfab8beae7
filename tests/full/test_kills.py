"""`kill -9` of each process kind once during a run of the real model; then everything must add up, to the bit."""

import os
import signal
import time

import pytest
from machine_rig import seeded_machine, small_spec

STEPS = 10
PAUSE_S = 4.0
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def machine():
    with seeded_machine() as running:
        yield running


@pytest.fixture(scope="module")
def killed_run(machine):
    """The run, completed in spite of everything, and what was killed."""
    api = machine.login()
    run = api.post("runs", {"name": "killed", "spec": small_spec(steps=STEPS)})
    published = "SELECT count(*) FROM controlplane_step WHERE run_id = %s AND state = 'published'"

    def steps() -> int:
        return machine.rows(published, run["id"])[0][0]

    machine.until(lambda: steps() >= 1, what="the first step", timeout_s=300)
    kinds = [name for name in machine.processes() if name != "engine-serving-1"]
    victims = [*kinds, "trainer", "postgres", "valkey"]
    for number, victim in enumerate(victims):
        pid = {**machine.services(), **machine.processes(), "trainer": None}[victim] or machine.until(
            machine.trainer, what="a trainer to kill", timeout_s=120
        )
        os.kill(pid, signal.SIGKILL)
        # On a fast machine the next one is killed sooner, so that all are while the run goes on.
        due, deadline = 2 + number * (STEPS - 2) // len(victims), time.monotonic() + PAUSE_S
        while steps() < due and time.monotonic() < deadline:
            time.sleep(0.2)
    assert steps() < STEPS, "the run was over before everything was killed"

    state = machine.until(lambda: machine.run_state(run["id"]), what="the end of the run", timeout_s=900)
    reason = machine.rows("SELECT state_reason FROM controlplane_run WHERE id = %s", run["id"])[0][0]
    assert state == "completed", reason
    return run, victims


def test_each_kind_was_killed(killed_run):
    _, victims = killed_run
    workers = {f"worker-{queue}" for queue in ("control", "rollout", "train", "transfer", "score")}
    engines = {"engine-rollout-west-1", "engine-rollout-east-1"}
    expected = workers | engines | {"web", "conductor", "services", "trainer", "postgres", "valkey"}
    assert expected <= set(victims)


def test_no_step_twice_and_no_version_missing(machine, killed_run):
    run, _ = killed_run
    steps = machine.rows(
        "SELECT s.number, s.state, v.epoch, v.number, v.root, b.number FROM controlplane_step s "
        "JOIN controlplane_policyversion v ON v.id = s.version_id "
        "JOIN controlplane_policyversion b ON b.id = s.base_version_id WHERE s.run_id = %s ORDER BY s.number",
        run["id"],
    )
    assert [row[0] for row in steps] == list(range(1, STEPS + 1))
    assert {row[1] for row in steps} == {"published"}
    assert [row[3] for row in steps] == list(range(1, STEPS + 1))
    assert [row[5] for row in steps] == list(range(STEPS))
    assert len({row[4] for row in steps}) == STEPS
    assert machine.head(run["lineage"]) == (STEPS, steps[-1][4])


def test_each_rollout_counts_once(machine, killed_run):
    run, _ = killed_run
    assert machine.rows("SELECT kind, error FROM controlplane_workunit WHERE state = 'dead'") == []
    batches = machine.rows(
        "SELECT s.number, count(*), count(DISTINCT i.rollout_id) FROM controlplane_batchitem i "
        "JOIN controlplane_step s ON s.id = i.step_id WHERE s.run_id = %s GROUP BY s.number ORDER BY s.number",
        run["id"],
    )
    assert batches == [(number, 8, 8) for number in range(1, STEPS + 1)]
    metric = (
        "SELECT step, count(*) FROM controlplane_metricpoint WHERE run_id = %s AND name = 'reward_mean' GROUP BY step"
    )
    assert sorted(machine.rows(metric, run["id"])) == [(number, 1) for number in range(1, STEPS + 1)]


def test_the_dashboards_numbers_are_the_databases(machine, killed_run):
    run, _ = killed_run
    api = machine.login()
    assert [step["number"] for step in api.all(f"runs/{run['id']}/steps")] == list(range(1, STEPS + 1))
    charts = {chart["key"]: chart for chart in api.page_json(f"/runs/{run['id']}/series.json")["charts"]}
    stored = machine.rows(
        "SELECT i.step, avg(i.reward) FROM (SELECT s.number AS step, i.reward FROM controlplane_batchitem i "
        "JOIN controlplane_step s ON s.id = i.step_id WHERE s.run_id = %s) i GROUP BY i.step ORDER BY i.step",
        run["id"],
    )
    drawn = next(line for line in charts["reward"]["lines"] if line["name"] == "batch")
    assert [round(value, 6) for value in drawn["y"]] == [round(float(mean), 6) for _, mean in stored]
    assert drawn["x"] == [step for step, _ in stored]


def test_every_replica_holds_the_trainers_weights_to_the_bit(machine, killed_run):
    run, _ = killed_run
    _, head = machine.head(run["lineage"])
    machine.until(lambda: machine.rollout_roots() == {head}, what="both replicas hold the head", timeout_s=120)
    # What was written down is one thing; what the engines compute with, asked of them directly, is another.
    roots = machine.python(
        "from controlplane.models import Replica\n"
        "from controlplane.conductor.fleet import look_at\n"
        "print(*[look_at(r).slots['default'].root for r in Replica.objects.filter(cluster__role='rollout')])"
    )
    assert set(roots.split()) == {head}


def test_the_exported_folder_is_the_trainers_and_generates_what_the_engine_does(machine, killed_run):
    run, _ = killed_run
    result = machine.compared(machine.export(run["id"]), cluster="rollout-west")
    assert result["root"] == machine.head(run["lineage"])[1]
    assert result["prompts"] == 8
    assert result["differing"] == []


def test_a_second_up_says_so_and_leaves_the_first_alone(machine, killed_run):
    second = machine.manage("up")
    assert second.returncode == 3
    assert "runs over" in second.stderr
    demo = machine.manage("demo", "--exit", "--steps", "1")
    assert demo.returncode == 2
    assert "runs over" in demo.stderr
    assert machine.web_answers()


def test_ctrl_c_ends_everything_that_was_started(machine, killed_run):
    pids = [*machine.processes().values(), *machine.services().values()]
    assert machine.stop() == 0
    assert [pid for pid in pids if alive(pid)] == []
    assert machine.manage("services", "status").returncode == 3


def alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
