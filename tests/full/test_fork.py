"""A fork of the real model: it trains on from its parent's weights, and what it exports is what its engine serves."""

import pytest
import torch
from machine_rig import seeded_machine, small_spec

from rl_core.delta import weights_root
from rl_core.models.checkpoint import read_checkpoint

WEST = ("rollout-west",)
VERSIONS = "SELECT number, root, delta_bytes FROM controlplane_policyversion WHERE lineage_id = %s ORDER BY number"
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def machine():
    with seeded_machine("--engines", *WEST, "--max-len", "512") as running:
        yield running


def completed(machine, run):
    state = machine.until(lambda: machine.run_state(run["id"]), what="the end of the run", timeout_s=500)
    reason = machine.rows("SELECT state_reason FROM controlplane_run WHERE id = %s", run["id"])[0][0]
    assert state == "completed", reason
    return machine.rows(VERSIONS, run["lineage"])


def test_a_fork_trains_on_from_its_parent_and_exports_what_its_engine_serves(machine):
    api = machine.login()
    parent = api.post("runs", {"name": "parent", "spec": small_spec(steps=2, clusters=WEST)})
    trained = completed(machine, parent)
    assert len({root for _, root, _ in trained}) == 3

    # From the middle: its weights are the model's plus a delta, and no engine or trainer stands there any more.
    stages = small_spec(steps=1, clusters=WEST)["stages"]
    body = {"name": "fork", "step_number": 1, "overrides": {"stages": stages, "seed": 7}}
    fork = api.post(f"runs/{parent['id']}/fork", body)
    assert fork["parent_version"]["number"] == 1
    versions = completed(machine, fork)
    assert [number for number, _, _ in versions] == [0, 1]
    assert versions[0][1] == trained[1][1]
    assert versions[1][1] not in {root for _, root, _ in trained}
    assert versions[1][2] > 0

    # What the trainer process was started from.
    base = machine.state / "checkpoints" / "bases" / fork["lineage"]
    torch.set_num_threads(1)
    assert weights_root(read_checkpoint(base)) == trained[1][1]

    machine.until(lambda: machine.rollout_roots() >= {versions[1][1]}, what="the engine holds the head", timeout_s=120)
    result = machine.compared(machine.export(fork["id"]), cluster="rollout-west")
    assert result == {"root": versions[1][1], "prompts": 8, "differing": []}
