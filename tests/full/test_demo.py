"""The demonstration as a newcomer runs it, cut short: its plan, its lines, its summary, its exit codes."""

import re
import socket

import pytest
from machine_rig import MODEL, Machine

from controlplane.processes.demo_spec import MAX_CONTEXT_TOKENS, DemoTask
from controlplane.processes.ports import free_port
from rl_core.chat import ChatTokenizer
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.world import MAX_RESULT_CHARS

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture
def machine(tmp_path):
    prepared = Machine(tmp_path / "state", port=free_port())
    yield prepared
    prepared.close()


def test_the_demonstration_from_start_to_summary(machine):
    done = machine.manage("demo", "--exit", "--steps", "2", "--port", str(machine.port), timeout_s=1100)
    text = done.stdout
    assert done.returncode in (0, 1), text + done.stderr
    assert text.count("plan: ") == 1
    for line in (
        r"plan: .*train 2 steps of word-problems \(seed 0\)",
        rf"open    http://localhost:{machine.port}/runs/[0-9a-f-]+/",
        r"log in  engineer / \S+",
        r"log in  reviewer / \S+",
        r"step   1/2  reward \d\.\d\d",
        r"step   2/2  reward \d\.\d\d",
        r"reward     first 1 → last 1 steps: .*difference [+-]\d",
        r"held-out   before → after: .*difference [+-]\d",
        r"rollout-east +\d+ versions, .* MB instead of .* times less\), pauses \d+ ms median",
        r"rollout-west +\d+ versions",
        r"weights    every replica's root equals the trainer's",
        r"verdict ",
    ):
        assert re.search(line, text), f"no line like {line!r} in:\n{text}"
    assert (done.returncode == 0) == ("it learned" in text)
    assert machine.manage("services", "status").returncode == 3, "the services should have ended with it"
    assert not machine.web_answers()


@pytest.mark.parametrize("task", DemoTask)
def test_no_session_outgrows_the_window_that_its_engines_reserve(task):
    environment = ENVIRONMENTS[task.value]
    chat = ChatTokenizer.load(MODEL)
    openings = [
        chat.render([{"role": message.role.value, "content": message.content} for message in environment.messages(one)])
        for one in environment.build_task_set().tasks
    ]
    result = MAX_RESULT_CHARS // 2  # what tools print has two characters a token or more
    turns = environment.max_turns
    longest = max(map(len, openings)) + turns * environment.sampling.max_tokens + (turns - 1) * result
    assert longest <= MAX_CONTEXT_TOKENS


def test_faults_are_said_with_exit_code_2(machine):
    folder = machine.state / "no-model"
    folder.mkdir()
    done = machine.manage("demo", "--exit", "--model", str(folder))
    assert done.returncode == 2
    assert "no model folder" in done.stderr
    assert machine.manage("demo", "--steps", "0").returncode == 2
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for command in ("demo", "up"):
            done = machine.manage(command, "--port", port)
            assert done.returncode == (2 if command == "demo" else 1)
            assert f"port {port} is in use" in done.stderr
