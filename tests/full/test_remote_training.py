"""Environments that others run, trained on end to end: every part real, on a tiny random model.

One is written with the `verifiers` library and lives in its own virtual environment, made by our command; the other is
a product's own harness over the real `openai` client, in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import call_command

from controlplane.models import BatchItem, Rollout, RolloutCall, RolloutSession, Run
from controlplane.selectors.rollout_routes import rollout_route
from controlplane.services.rollout_sessions import calls_of, key_digest, session_key
from controlplane.services.runs import run_create
from controlplane.services.task_sets import TaskFile, task_set_upload
from controlplane.states import RunState, StepState
from rl_core.environments.remote import conformance, verifiers_env
from rl_core.environments.tasks import Task, TaskSet, parse_task_set
from rl_core.store import open_store
from rl_core.types import Split, Trajectory
from tests.controlplane.gateway.gateway_rig import listening
from tests.domain_factories import TESTER
from tests.loop_rig import Rig, running_rig
from tests.remote_rows import SECRET

pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.django_db(transaction=True)]

ROOT = Path(__file__).resolve().parents[2]
STAGE = {
    "kind": "rl",
    "steps": 1,
    "prompts_per_step": 1,
    "group_size": 4,
    "max_staleness": 1,
    "eval_tasks": 1,
    "sampling": {"max_tokens": 6},
    "max_turns": 4,
    "max_context_tokens": 1024,
    "optimizer": {"learning_rate": 1e-2},
}


@contextlib.contextmanager
def web() -> Iterator[str]:
    """The web process's application in a thread of its own; its address."""
    address: list[str] = []
    up, down = threading.Event(), threading.Event()

    async def serve() -> None:
        async with listening() as at:
            address.append(at)
            up.set()
            await asyncio.to_thread(down.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert up.wait(60)
    try:
        yield address[0]
    finally:
        down.set()
        thread.join(20)


@contextlib.contextmanager
def process(words: list[str], *, folder: Path, port: int) -> Iterator[str]:
    """A customer's server; its address once it answers."""
    url = f"http://127.0.0.1:{port}/"
    running = subprocess.Popen([sys.executable, "-m", *words, "--port", str(port)], cwd=folder)
    try:
        deadline = time.monotonic() + 600  # the first time, the library is installed
        while True:
            assert running.poll() is None, f"{words[0]} ended with {running.returncode}"
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(url, content=b"{}")
                break
            time.sleep(0.3)
        yield url
    finally:
        running.terminate()
        running.wait(30)


def secret_file(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text(SECRET)
    return path


def train(rig: Rig, slug: str, tasks: TaskSet) -> Run:
    """Register what answers, and take one step on it."""
    content = tasks.to_jsonl()
    task_set_upload(
        project=rig.project, slug=slug, environment=slug, content=content, kind=TaskFile.JSONL, actor=TESTER
    )
    stage = {**STAGE, "environment": slug, "task_set": slug, "rubric": slug}
    spec: dict[str, Any] = {"model": "tiny", "seed": 5, "stages": [stage]}
    run = run_create(project=rig.project, name=slug, spec=spec, actor=TESTER)
    return rig.run_to_end(run, timeout_s=400)


def check(run: Run, settings: Any, *, calls: int) -> dict[str, Trajectory]:
    """What every remote rollout of a step must be, by value; the trajectories by rollout."""
    assert run.state == RunState.COMPLETED
    step = run.steps.get()
    assert step.state == StepState.PUBLISHED
    items = list(BatchItem.objects.filter(step=step).order_by("pk"))
    assert len(items) == 4
    rewards = [item.reward for item in items]
    mean = sum(rewards) / len(rewards)
    apart = [abs(reward - mean) for reward in rewards]
    assert step.metrics["reward_mean"] == pytest.approx(mean)
    assert step.metrics["advantage_abs_mean"] == pytest.approx(sum(apart) / len(apart))
    # Dr. GRPO: what differs from the group's mean moves the weights, and nothing else does.
    assert (step.version.root != step.base_version.root) == (len(set(rewards)) > 1)
    store = open_store(settings.STORE_URL)
    trajectories = {}
    for item in items:
        trajectory = Trajectory.from_bytes(store.get_blob(item.trajectory_key))
        session = RolloutSession.objects.get(rollout=item.rollout_id, reason="")
        kept = calls_of(session.pk, store)
        assert len(kept) == calls
        # One conversation, continued: one segment, whose trained tokens are those that the engine gave, call by call.
        (segment,) = trajectory.segments
        trained = [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
        logprobs = [value for value, mask in zip(segment.logprobs, segment.loss_mask, strict=True) if mask]
        assert trained == [token for call in kept for token in call.generated.token_ids]
        assert logprobs == [value for call in kept for value in call.generated.logprobs]
        assert all(value < 0 for value in logprobs)
        assert segment.token_ids == kept[-1].token_ids
        assert segment.sampling.temperature == 1.0
        assert {span.version for span in segment.spans} == {str(step.base_version.ref)}
        assert trajectory.reported["reward"] == item.reward == session.result["reward"]
        trajectories[str(item.rollout_id)] = trajectory
    for session in RolloutSession.objects.filter(rollout__group__run=run):
        assert session.ended_at is not None
        assert session.digest == key_digest(session_key(session.pk))
        assert session.digest == hashlib.sha256(session_key(session.pk).encode()).hexdigest()
        assert rollout_route(session.digest) is None
    assert (
        RolloutCall.objects.filter(session__rollout__group__run=run).count()
        == calls * Rollout.objects.filter(group__run=run).exclude(trajectory_key="").count()
    )
    return trajectories


def test_a_verifiers_environment_and_a_products_harness_are_trained_on(tmp_path, settings):
    vowels = ROOT / "tests" / "rl_core" / "environments" / "remote"
    secret = secret_file(tmp_path)
    written = tmp_path / "tasks.jsonl"
    with running_rig(tmp_path, settings, clusters=1) as rig, web() as address:
        settings.PUBLIC_URL = address
        words = ["rl_core.environments.remote.verifiers_env", "vowels", "--secret-file", str(secret)]
        words += ["--venv", str(ROOT / "var" / "verifiers" / verifiers_env.VERSION), "--write-tasks", str(written)]
        with process(words, folder=vowels, port=free_port()) as url:
            assert conformance.main([url, "--secret-file", str(secret)]) == 0
            add(rig, "vowels", url, secret)
            run = train(rig, "vowels", parse_task_set(written.read_bytes()))
            trajectories = check(run, settings, calls=1)
        for trajectory in trajectories.values():
            reply = trajectory.messages[-1].content
            expected = 0.5 * any(letter in reply for letter in "aeiou") + 0.5 * bool(reply)
            assert trajectory.reported["reward"] == expected
            assert [message.content for message in trajectory.messages[:1]] == ["Be short."]
        words = ["rl_core.environments.remote.server", "tests.full.product_shop:SHOP", "--secret-file", str(secret)]
        with process(words, folder=ROOT, port=free_port()) as url:
            add(rig, "shop", url, secret)
            tasks = TaskSet(
                tuple(
                    Task(id=f"{split}-{n}", split=split, input={"question": f"What is {split} {n}?"})
                    for split in Split
                    for n in range(3)
                )
            )
            shop = train(rig, "shop", tasks)
            check(shop, settings, calls=2)


def add(rig: Rig, slug: str, url: str, secret: Path) -> None:
    """As an operator does."""
    options = ["--project", rig.project.slug, "--remote", url, "--secret-file", str(secret)]
    call_command("add", "environment", slug, *options)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
