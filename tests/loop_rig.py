"""A whole loop on one machine with a tiny random model: real engines, a real trainer, real weights, real workers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.conductor import run_advance
from controlplane.conductor.fleet import fleet_poll, slots_reconcile
from controlplane.models import ModelCard, Project, Replica, Run, WorkUnit
from controlplane.services.catalog import model_register, rubric_publish, task_set_create
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.work import work_sweep
from controlplane.states import ReplicaState, RunState, WorkKind, WorkState
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.store import open_store
from rl_core.types import ClusterRole, VersionRef
from tests.domain_factories import TESTER, make_project
from workers import control, rollout, score, train, transfer
from workers.base import work_on

# What random text has about every other time: rewards differ within a group, so that steps change weights.
CRITERIA: list[dict[str, Any]] = [
    {"key": "vowel", "text": "has a vowel", "kind": "regex", "weight": 1.0, "params": {"pattern": "[aeiou]"}}
]

WORK: dict[str, Callable[..., None]] = {
    WorkKind.ROLLOUT: rollout.rollout,
    WorkKind.SCORE: score.score,
    WorkKind.TRAIN: train.train,
    WorkKind.TRANSFER: transfer.transfer,
    WorkKind.EXPORT: control.export,
}


def tiny_model(folder: Path, *, experts: int = 0) -> Path:
    """A random model that speaks ChatML in bytes."""
    from tests.rl_core.chat_factory import chat_folder
    from tests.rl_core.models.tiny_models import make_folder

    made = make_folder(folder, experts=experts, vocab_size=302, max_position_embeddings=2048)
    return chat_folder(made)


@dataclass
class Engine:
    """One engine process and how to start it again."""

    replica: Replica
    command: list[str]
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """As kill -9."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """As the supervisor would."""
        self.process = subprocess.Popen(self.command)


@dataclass
class Rig:
    """A project with a model, a task set, a rubric and rollout clusters whose engines run."""

    project: Project
    model: ModelCard
    engines: list[Engine] = field(default_factory=list)

    def turn(self, run: Run) -> bool:
        """The conductor looks once, then every queued unit is worked on once; whether there was anything to do."""
        fleet_poll()
        work_sweep()
        run_advance(run.pk)
        slots_reconcile()
        units = list(WorkUnit.objects.filter(project=self.project, state=WorkState.QUEUED))
        for unit in sorted(units, key=lambda unit: (unit.kind != WorkKind.TRANSFER, unit.created_at)):
            work_on(unit.pk, WORK[unit.kind])
        return bool(units)

    def run_to_end(self, run: Run, *, timeout_s: float = 240.0, each: Callable[[Run], None] | None = None) -> Run:
        """Turn until the run has ended."""
        deadline = time.monotonic() + timeout_s
        while run.finished_at is None:
            assert time.monotonic() < deadline, f"run is {run.state}: {run.state_reason}"
            if not self.turn(run):
                time.sleep(0.05)
            run.refresh_from_db()
            if each is not None:
                each(run)
        assert run.state == RunState.COMPLETED, run.state_reason
        return run

    def wait_ready(self, *, timeout_s: float = 180.0) -> None:
        """Until every engine answers."""
        deadline = time.monotonic() + timeout_s
        replicas = Replica.objects.filter(cluster__project=self.project)
        while replicas.exclude(state=ReplicaState.READY).exists():
            assert time.monotonic() < deadline, list(replicas.values_list("name", "state", "error"))
            time.sleep(0.2)
            fleet_poll()


@contextlib.contextmanager
def running_rig(
    tmp_path: Path, settings: Any, *, clusters: int = 2, experts: int = 0, store_url: str = ""
) -> Iterator[Rig]:
    """Everything up, and down again at the end."""
    from workers import base

    settings.STORE_URL = store_url or (tmp_path / "store").as_uri()
    settings.REPLICA_TOKEN_DIR = tmp_path / "tokens"
    settings.CHECKPOINT_DIR = tmp_path / "checkpoints"
    settings.STATE_DIR = tmp_path / "state"
    settings.SANDBOX_SOCKET = tmp_path / "no-sandbox.sock"
    settings.ROLLOUT_SLICE_S = 4  # one thread plays all workers: none may keep the others waiting for long
    settings.REPLICA_TOKEN_DIR.mkdir()
    base.store.cache_clear()
    project = make_project()
    folder = tiny_model(tmp_path, experts=experts)
    rig = Rig(project, register(project, folder, settings.STORE_URL))
    environment = ENVIRONMENTS["word-problems"]
    task_set_create(
        project=project,
        slug="word-problems",
        environment="word-problems",
        tasks=environment.build_task_set(),
        actor=TESTER,
    )
    rubric_publish(project=project, slug="word-problems", criteria=CRITERIA, author=None, note="", actor=TESTER)
    try:
        for name in ("east", "west")[:clusters]:
            rig.engines.append(_start_engine(project, name, folder, settings))
        rig.wait_ready()
        yield rig
    finally:
        for engine in rig.engines:
            engine.kill()
        train._resident.close()
        base.store.cache_clear()


def register(project: Project, folder: Path, store_url: str) -> ModelCard:
    """Publish the folder's weights and add the model."""
    from rl_core.delta import publish_snapshot
    from rl_core.models.checkpoint import read_checkpoint

    published = publish_snapshot(
        open_store(store_url),
        read_checkpoint(folder),
        key_prefix="snapshots/tiny",
        version=VersionRef("tiny", 0, 0),
    )
    return model_register(
        project=project,
        slug="tiny",
        folder=str(folder),
        root=published.root,
        manifest_key=published.manifest_key,
        full_bytes=published.full_bytes,
        parameters=published.elements,
        architecture="LlamaForCausalLM",
        actor=TESTER,
    )


def _start_engine(project: Project, name: str, folder: Path, settings: Any) -> Engine:
    port, control_port = _free_ports(2)
    cluster = cluster_create(
        project=project, slug=name, role=ClusterRole.ROLLOUT, region=name, capacity=8, actor=TESTER
    )
    replica = replica_register(
        cluster=cluster,
        name=f"{name}-0",
        inference_url=f"http://127.0.0.1:{port}",
        control_url=f"http://127.0.0.1:{control_port}",
        actor=TESTER,
    )
    tokens = {kind: settings.REPLICA_TOKEN_DIR / f"{replica.pk}.{kind}" for kind in ("inference", "control")}
    for kind, path in tokens.items():
        path.write_text(f"{kind}-{name}\n")
    command = [
        *(sys.executable, "-m", "rl_core.engines", "--model", str(folder), "--name", f"{name}-0"),
        *("--port", str(port), "--control-port", str(control_port), "--store", settings.STORE_URL),
        *("--inference-token-file", str(tokens["inference"]), "--control-token-file", str(tokens["control"])),
        *("--max-len", "1536", "--max-seqs", "8", "--spool", str(settings.STATE_DIR / "spool" / name)),
    ]
    return Engine(replica, command, subprocess.Popen(command))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
