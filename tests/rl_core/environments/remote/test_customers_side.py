"""What a customer runs: with the standard library alone, from the command line, and for `verifiers`."""

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from rl_core.environments.remote import server, verifiers_env, verifiers_server
from rl_core.environments.remote.client import RemoteClient, RemotePlace
from rl_core.environments.remote.messages import Result
from rl_core.environments.remote.sessions import Model, Session
from rl_core.environments.tasks import parse_task_set
from rl_core.types import Split
from tests.rl_core.environments.remote.customers import SECRET

ROOT = Path(__file__).parents[4]
SERVED = ("protocol", "worlds", "sessions", "server", "conformance", "verifiers_env", "verifiers_server")


def test_the_customers_side_needs_the_standard_library_alone():
    modules = ", ".join(f"rl_core.environments.remote.{name}" for name in SERVED)
    code = f"import {modules}"  # without site-packages anything else fails to import
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    assert subprocess.run([sys.executable, "-S", "-c", code], env=environment, check=False).returncode == 0


async def test_the_command_serves_an_object(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    words = ["rl_core.environments.remote.server", "tests.rl_core.environments.remote.customers:COUNTER"]
    serving = subprocess.Popen(
        [sys.executable, "-m", *words, "--secret-file", str(secret), "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = serving.stdout.readline()
        url = line.split(" at ")[1].strip()
        described = await RemoteClient(RemotePlace(url, SECRET)).describe()
        assert [tool.name for tool in described.tools] == ["add"]
        async with httpx.AsyncClient() as http:
            assert (await http.post(url, content=b"{}")).status_code == 401
            assert (await http.get(url)).status_code == 501
    finally:
        serving.terminate()
        serving.wait(10)
        serving.stdout.close()


@pytest.mark.parametrize(
    ("served", "secret", "message"),
    [
        ("tests.rl_core.environments.remote.customers:NONE", SECRET, "no attribute 'NONE'"),
        ("tests.rl_core.no_such:COUNTER", SECRET, "No module named"),
        ("tests.rl_core.environments.remote.customers:COUNTER", "plain", "not base64"),
        ("tests.rl_core.environments.remote.customers:COUNTER", None, "No such file"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, capsys, served, secret, message):
    file = tmp_path / "secret"
    if secret is not None:
        file.write_text(secret)
    with pytest.raises(SystemExit) as caught:
        server.main([served, "--secret-file", str(file), "--port", "0"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def trace(*, rewards, trainable=True, truncated=False, error=None):
    named = {name: score if score is None else SimpleNamespace(score=score) for name, score in rewards.items()}
    return SimpleNamespace(
        agent=SimpleNamespace(trainable=trainable),
        reward=sum(score or 0 for score in rewards.values()),
        rewards=named,
        is_truncated=truncated,
        last_error=error,
    )


def episode(*traces, ok=True, errors=(), timeout=False):
    return SimpleNamespace(traces=list(traces), ok=ok, errors=list(errors), is_timeout=timeout)


def failed(kind):
    return SimpleNamespace(type=kind, message="it broke")


EPISODES = {
    "one trace": (
        episode(trace(rewards={"a": 0.25, "b": 0.5})),
        {"reward": 0.75, "scores": {"a": 0.25, "b": 0.5}, "ending": "terminated"},
    ),
    "the mean of what is trained": (
        episode(trace(rewards={"a": 1.0}), trace(rewards={"a": 0.0}), trace(rewards={"j": 0.9}, trainable=False)),
        {"reward": 0.5, "scores": {"a": 0.0}, "ending": "terminated"},
    ),
    "cut off": (
        episode(trace(rewards={"a": 0.0}, truncated=True)),
        {"reward": 0.0, "scores": {"a": 0.0}, "ending": "truncated"},
    ),
    "names that are none of a score are left out": (
        episode(trace(rewards={"reward": 0.25, "_private": 0.25, "größe": 0.25, "A": 0.0, "fine": 0.25})),
        {"reward": 1.0, "scores": {"fine": 0.25}, "ending": "terminated"},
    ),
    "no score where scoring did not run": (
        episode(trace(rewards={"a": 1.0, "b": None})),
        {"reward": 1.0, "scores": {"a": 1.0}, "ending": "terminated"},
    ),
}


@pytest.mark.parametrize(("played", "told"), EPISODES.values(), ids=EPISODES)
def test_results_of_episodes(played, told):
    assert verifiers_server.result_of(played) == told


BROKEN = {
    "over one": (episode(trace(rewards={"a": 1.0, "b": 0.5})), "environment", "sum to 1.5"),
    "the task's code": (episode(trace(rewards={}, error=failed("TaskError")), ok=False), "environment", "TaskError"),
    "the model's endpoint": (
        episode(trace(rewards={}, error=failed("ProviderError")), ok=False),
        "infrastructure",
        "ProviderError: it broke",
    ),
    "nothing trained": (episode(trace(rewards={}, trainable=False)), "environment", "no trainable trace"),
    "the episode's own": (episode(ok=False, errors=[failed("EnvError")]), "environment", "EnvError"),
}


@pytest.mark.parametrize(("played", "fault", "message"), BROKEN.values(), ids=BROKEN)
def test_episodes_without_a_result(played, fault, message):
    error = verifiers_server.result_of(played)["error"]
    assert error["fault"] == fault
    assert message in error["message"]


def test_no_more_scores_are_told_than_are_taken():
    told = verifiers_server.result_of(episode(trace(rewards={f"s{n}": 0.0 for n in range(150)})))
    assert len(Result(reward=told["reward"], scores=told["scores"]).scores) == 100


def test_an_environment_that_does_not_come_up_ends_the_server():
    @contextlib.asynccontextmanager
    async def serving():
        raise OSError("no runtime")
        yield

    environment = verifiers_server.VerifiersEnvironment.__new__(verifiers_server.VerifiersEnvironment)
    environment._env = SimpleNamespace(serving=serving)
    environment.prepare()
    with pytest.raises(SystemExit, match="does not come up: OSError: no runtime"):
        environment.start()


def test_a_sessions_key_is_in_no_text_of_it():
    model = Model("http://127.0.0.1:9/v1", "slwr_secret", "policy")
    session = Session(id="s", task={}, model=model, limits={}, deadline_s=1.0, callback="http://127.0.0.1:9/")
    assert "slwr_secret" not in f"{model!r} {session!r}"


def test_a_taskset_is_written_as_a_task_set(tmp_path):
    path = tmp_path / "tasks.jsonl"
    verifiers_server.write_tasks(10, path, heldout=0.2)
    tasks = parse_task_set(path.read_bytes())
    assert [task.input["index"] for task in tasks.split(Split.TRAIN)] == list(range(8))
    assert [task.input["index"] for task in tasks.split(Split.HELDOUT)] == [8, 9]


def test_an_installed_library_is_not_installed_again(tmp_path):
    wanted = "\n".join([f"verifiers=={verifiers_env.VERSION}", "uv", "extra"])
    (tmp_path / "installed").write_text(hashlib.sha256(wanted.encode()).hexdigest())
    python = verifiers_env.ensure(tmp_path, ["extra"])
    assert python == tmp_path / "bin" / "python"
    assert not (tmp_path / "bin").exists()


def test_the_server_runs_in_its_own_environment_with_our_modules():
    words, environment = verifiers_env.command(Path("/v/bin/python"), ["vowels", "--port", "1"])
    assert words == ["/v/bin/python", "-m", "rl_core.environments.remote.verifiers_server", "vowels", "--port", "1"]
    assert environment["PATH"].startswith("/v/bin:")
    assert environment["PYTHONPATH"] == str(ROOT)
