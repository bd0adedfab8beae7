"""A whole Slipway on this machine, driven from outside as people drive it: commands, HTTP, signals."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import psutil
import psycopg
import pytest

from controlplane.processes.ports import free_port

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "var" / "models" / "smollm2-135m-instruct"
HEAD = (
    "SELECT v.number, v.root FROM controlplane_lineage l JOIN controlplane_policyversion v ON v.id = l.head_id "
    "WHERE l.id = %s"
)
SLOTS = (
    "FROM controlplane_replicaslot s JOIN controlplane_replica r ON r.id = s.replica_id "
    "JOIN controlplane_cluster c ON c.id = r.cluster_id"
)
_T = TypeVar("_T")


class Machine:
    """`manage.py up` over a state folder of its own."""

    def __init__(self, state: Path, *, port: int) -> None:
        self.state = state
        self.port = port
        self.up: subprocess.Popen[bytes] | None = None
        self._clients: list[httpx.Client] = []
        (state / "models").mkdir(parents=True)
        (state / "models" / MODEL.name).symlink_to(MODEL)

    def environment(self) -> dict[str, str]:
        """Ours, less what points the tests at their own services."""
        kept = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        return {**kept, "SLIPWAY_STATE": str(self.state), "LEASE_S": "10", "REDELIVERY_S": "5"}

    def manage(self, *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *words],
            cwd=ROOT,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *words: str) -> None:
        """Start everything; what it prints goes to a file."""
        with (self.state / "up.txt").open("ab") as output:
            self.up = subprocess.Popen(
                [sys.executable, str(ROOT / "manage.py"), "up", "--quiet", "--port", str(self.port), *words],
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.until(self.web_answers, what="the web process answers", timeout_s=120)

    def stop(self) -> int:
        """Ctrl-C, and the exit code."""
        assert self.up is not None
        self.up.send_signal(signal.SIGINT)
        code = self.up.wait(90)
        self.up = None
        return code

    def close(self) -> None:
        """Whatever is left."""
        for client in self._clients:
            client.close()
        if self.up is not None:
            self.up.terminate()
            self.up.wait(90)
        self.manage("services", "stop")

    def python(self, code: str) -> str:
        """What a piece of Python prints that has Slipway's models."""
        done = subprocess.run(
            [sys.executable, "-c", f"import django; django.setup()\n{code}"],
            cwd=ROOT,
            env={**self.environment(), "DJANGO_SETTINGS_MODULE": "controlplane.settings"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def head(self, lineage: str) -> tuple[int, str]:
        """Number and root of a lineage's newest version."""
        return self.rows(HEAD, lineage)[0]

    def run_state(self, run: str) -> str:
        """How the run ended; empty while it has not."""
        state = self.rows("SELECT state FROM controlplane_run WHERE id = %s", run)[0][0]
        return state if state in ("completed", "failed", "stopped") else ""

    def rollout_roots(self) -> set[str]:
        """Roots that the replicas of rollout clusters say they hold."""
        return {root for (root,) in self.rows(f"SELECT s.current_root {SLOTS} WHERE c.role = 'rollout'")}

    def export(self, run: str) -> Path:
        """The run's head as a Hugging Face folder: asked for, waited for and downloaded over the API."""
        version = self.rows(
            "SELECT l.head_id::text FROM controlplane_run r JOIN controlplane_lineage l ON l.id = r.lineage_id "
            "WHERE r.id = %s",
            run,
        )[0][0]
        key = self.python(
            "from controlplane.models import Run\n"
            "from controlplane.services.events import SYSTEM\n"
            "from controlplane.services.tenancy import api_key_create\n"
            f"project = Run.objects.get(pk='{run}').project\n"
            "print(api_key_create(project=project, name='exports', scopes=['export'], actor=SYSTEM)[1])"
        )
        with httpx.Client(
            base_url=f"http://localhost:{self.port}/api/v1/projects/demo",
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        ) as client:
            asked = client.post("/exports", json={"version": version, "reason": "to compare"})
            assert asked.status_code == 202, asked.text
            path = f"/exports/{asked.json()['id']}"
            self.until(lambda: client.get(path).json()["state"] == "ready", what=f"{path} is ready", timeout_s=120)
            folder = self.state / "downloads" / version
            folder.mkdir(parents=True)
            for file in client.get(path).json()["files"]:
                content = client.get(f"{path}/files/{file['name']}").content
                assert hashlib.sha256(content).hexdigest() == file["sha256"]
                (folder / file["name"]).write_bytes(content)
        return folder

    def compared(self, folder: Path, *, cluster: str) -> dict[str, Any]:
        """What `compare_export.py` says of the folder and the cluster's engine."""
        replica, url = self.rows(f"SELECT r.id::text, r.inference_url {SLOTS} WHERE c.slug = %s", cluster)[0]
        token = (self.state / "run" / "tokens" / f"{replica}.inference").read_text()
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "compare_export.py"), str(folder), url, token],
            cwd=ROOT,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1])

    def web_answers(self) -> bool:
        """Whether the web process answers."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/healthz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def processes(self) -> dict[str, int]:
        """What the supervisor runs, by name."""
        try:
            records = msgspec.json.decode((self.state / "run" / "processes.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}
        return {name: record["pid"] for name, record in records.items()}

    def services(self) -> dict[str, int]:
        """PostgreSQL and Valkey, by name."""
        folder = self.state / "services"
        return {
            name: msgspec.json.decode((folder / f"{name}.json").read_bytes())["pid"] for name in ("postgres", "valkey")
        }

    def trainer(self) -> int | None:
        """The resident trainer of the train worker, while there is one."""
        try:
            for process in psutil.Process(self.processes()["worker-train"]).children(recursive=True):
                if "rl_core.trainer" in " ".join(process.cmdline()):
                    return process.pid
        except (KeyError, psutil.NoSuchProcess):
            pass  # just now being started again
        return None

    def until(self, holds: Callable[[], _T], *, what: str, timeout_s: float) -> _T:
        """Wait until it holds; fails with the end of the logs."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = holds()
            if found:
                return found
            assert self.up is None or self.up.poll() is None, f"`up` ended:\n{self.tail('../up.txt')}"
            time.sleep(0.2)
        logs = "\n".join(
            f"== {path.name}\n{self.tail(path.name, 4)}" for path in sorted((self.state / "logs").glob("*.log"))
        )
        raise AssertionError(f"not within {timeout_s} s: {what}\n{logs}")

    def tail(self, name: str, lines: int = 20) -> str:
        """The end of a log."""
        path = self.state / "logs" / name
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(none)"

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """A query, straight from PostgreSQL; where that is being started again, a little later."""
        url = msgspec.json.decode((self.state / "services.json").read_bytes())["database_url"]
        deadline = time.monotonic() + 180
        while True:
            try:
                with psycopg.connect(url, connect_timeout=5) as connection:
                    return connection.execute(sql, values).fetchall()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def login(self, name: str = "engineer") -> Api:
        """Log in as a person does, by the form."""
        password = msgspec.json.decode((self.state / "demo_logins.json").read_bytes())[name]
        client = httpx.Client(base_url=f"http://localhost:{self.port}", timeout=30, follow_redirects=False)
        client.get("/login/").raise_for_status()
        token = client.cookies["csrftoken"]
        answer = client.post(
            "/login/",
            data={"username": name, "password": password, "csrfmiddlewaretoken": token},
            headers={"Referer": f"http://localhost:{self.port}/login/"},
        )
        assert answer.status_code == 302, answer.text
        self._clients.append(client)
        return Api(client)


@contextlib.contextmanager
def seeded_machine(*flags: str) -> Iterator[Machine]:
    """A machine with the demonstration's project, started with `flags`; if it does not start its folder stays."""
    if not (MODEL / "model.safetensors").is_file():
        pytest.fail(f"{MODEL} is missing; run: make setup")
    state = Path(tempfile.mkdtemp(prefix="slipway-machine-"))
    running = Machine(state, port=free_port())
    try:
        assert running.manage("services", "start").returncode == 0
        assert running.manage("migrate").returncode == 0
        seeded = running.manage("seed")
        assert seeded.returncode == 0, seeded.stderr
        assert running.manage("services", "stop").returncode == 0
        running.start(*flags)
        yield running
    finally:
        running.close()
    shutil.rmtree(state)


class Api:
    """The REST API of project `demo` over a browser's session."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def get(self, path: str, **query: Any) -> Any:
        """One resource or page."""
        answer = self.client.get(f"/api/v1/projects/demo/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def all(self, path: str, **query: Any) -> list[Any]:
        """Every row of a list, page by page."""
        found, cursor = [], ""
        while cursor is not None:
            page = self.get(path, page_size=100, **query, **({"cursor": cursor} if cursor else {}))
            found += page["results"]
            cursor = page["next_cursor"]
        return found

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """One change."""
        answer = self.client.post(
            f"/api/v1/projects/demo/{path}",
            json=body,
            headers={"X-CSRFToken": self.client.cookies["csrftoken"], "Referer": str(self.client.base_url)},
        )
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def page_json(self, path: str) -> Any:
        """Data that a page draws."""
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()


def small_spec(
    *, steps: int, seed: int = 0, clusters: tuple[str, ...] = ("rollout-west", "rollout-east")
) -> dict[str, Any]:
    """Word problems with the real model, cut down: two prompts of four attempts, ten held-out tasks."""
    stage = {
        "kind": "rl",
        "steps": steps,
        "prompts_per_step": 2,
        "group_size": 4,
        "eval_tasks": 10,
        "checkpoint_every": 2,
    }
    return {
        "model": MODEL.name,
        "stages": [stage],
        "seed": seed,
        "rollout_clusters": list(clusters),
    }
