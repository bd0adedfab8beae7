"""An environment of the `verifiers` library (0.4, its `verifiers.v1` API) behind the remote protocol.

Runs in an environment of its own, where `verifiers` is installed: see `verifiers_env`. Beside it the standard library
alone is needed. The environment's code is unchanged: its taskset, its harness and its rewards are what they are under
the library's own `eval`, and the model it asks is the policy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

from rl_core.environments.remote.protocol import Json, Refusal, Refused
from rl_core.environments.remote.server import RemoteServer, http_server
from rl_core.environments.remote.sessions import Session

_KEY_VARIABLE = "SLIPWAY_SESSION_API_KEY_"
_SCORE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_SCORES = 100
_INFRASTRUCTURE = frozenset({"ProviderError", "InterceptionError", "TunnelError", "SandboxError"})


class VerifiersEnvironment:
    """One loaded environment, with an event loop of its own that every session runs in."""

    def __init__(self, config: Json) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._env: Any = load_environment(resolve_env_config(config))
        self.tasks: list[Any] = list(self._env.taskset)
        if not self.tasks:
            raise SystemExit(f"taskset {config['taskset']['id']} is empty")
        self.prepare()

    def prepare(self) -> None:
        """The event loop that every session runs in, and its thread."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._trouble = ""
        self._thread = threading.Thread(target=self._serve, name="verifiers", daemon=True)

    @property
    def example(self) -> Json:
        """The first task."""
        return {"task": {"id": "example", "split": "train", "input": {"index": 0}, "reference": {}}}

    def check(self, *, allow_local_code: bool) -> None:
        """Refuse a harness that runs the model's commands on this machine, unless wanted. Raises: SystemExit."""
        from verifiers.v1.configs.agent import agent_config_fields

        for name, agent in agent_config_fields(self._env.config).items():
            harness = self._env._harnesses[name]
            if harness.EXECUTES_CODE and agent.runtime.type == "subprocess" and not allow_local_code:
                raise SystemExit(
                    f"harness {harness.config.id!r} of {name} would run the model's commands on this machine; "
                    "choose a runtime with --runtime docker (or podman, prime, ...), or say --allow-local-code"
                )

    def start(self) -> None:
        """Bring up what the environment shares between sessions. Raises: SystemExit when that fails."""
        self._thread.start()
        self._ready.wait()
        if self._trouble:
            raise SystemExit(f"the environment does not come up: {self._trouble}")

    def run(self, session: Session) -> Json:
        """One episode of the task, with the session's endpoint as its model."""
        task = self._task(session.task)
        future = asyncio.run_coroutine_threadsafe(self._episode(task, session), self._loop)
        while True:
            with contextlib.suppress(TimeoutError):
                return result_of(future.result(timeout=0.2))
            if future.done():
                return result_of(future.result())
            if session.cancelled.is_set():
                future.cancel()
                return {"error": {"fault": "environment", "message": "cancelled"}}

    async def _episode(self, task: Any, session: Session) -> Any:
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig

        # The library reads keys from the environment, and gives none that is named so to programs it runs.
        variable = _KEY_VARIABLE + "".join(letter for letter in session.id if letter.isalnum())
        os.environ[variable] = session.model.api_key  # noqa: TID251  # the library's own way in
        try:
            client = EvalClientConfig(base_url=session.model.base_url, api_key_var=variable)
            sampling = SamplingConfig(max_tokens=session.limits.get("max_tokens"))
            context = ModelContext(model=session.model.name, client=client, sampling=sampling)
            async with asyncio.timeout(session.deadline_s):
                return await self._env.run_episode(task, context)
        finally:
            os.environ.pop(variable, None)  # noqa: TID251

    def _task(self, task: Json) -> Any:
        index = task.get("input", {}).get("index")
        if not isinstance(index, int) or not 0 <= index < len(self.tasks):
            raise Refused(Refusal.MALFORMED, f"input.index must be 0 to {len(self.tasks) - 1}")
        return self.tasks[index]

    def _serve(self) -> None:
        async def hold() -> None:
            async with self._env.serving():
                self._ready.set()
                await asyncio.Event().wait()

        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(hold())
        except Exception as error:  # noqa: BLE001  # the library's and the environment's code: whoever waits is told
            self._trouble = f"{type(error).__name__}: {error}"
        finally:
            self._loop.close()
            self._ready.set()


def result_of(episode: Any) -> Json:
    """What came of an episode: the mean reward of its trainable traces, and each named reward that lies in [0, 1]."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces if trace.last_error)]
    cut = episode.is_timeout or any(trace.is_truncated for trace in traces)
    if not traces or (not episode.ok and errors):
        told = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has no trainable trace"
        fault = "infrastructure" if errors and errors[-1].type in _INFRASTRUCTURE else "environment"
        return {"error": {"fault": fault, "message": told[:500]}}
    reward = sum(float(trace.reward) for trace in traces) / len(traces)
    named = {name: one.score for trace in traces for name, one in trace.rewards.items() if one is not None}
    told_names = [name for name, score in named.items() if 0 <= score <= 1 and _SCORE.fullmatch(name)]
    scores = {name: named[name] for name in told_names[:_MAX_SCORES] if name != "reward"}
    if not 0 <= reward <= 1:
        message = f"the rewards sum to {reward:g}: weigh them so that they stay in [0, 1]"
        return {"error": {"fault": "environment", "message": message}}
    return {"reward": reward, "scores": scores, "ending": "truncated" if cut else "terminated"}


def write_tasks(count: int, path: Path, *, heldout: float) -> None:
    """The taskset as a task set for upload: every task by its index, the last share of them held out."""
    held = max(1, round(count * heldout)) if count > 1 else 0
    with path.open("w") as file:
        for index in range(count):
            split = "heldout" if index >= count - held else "train"
            task = {"id": f"task-{index}", "split": split, "input": {"index": index}, "reference": {}}
            file.write(json.dumps(task) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Serve until the process is told to end."""
    parser = argparse.ArgumentParser(prog="verifiers_server", description=__doc__)
    parser.add_argument("taskset", help="id of an importable taskset")
    parser.add_argument("--secret-file", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--harness", default="null", help="the program that the model is run in")
    parser.add_argument("--runtime", default="subprocess", help="where that program runs")
    parser.add_argument("--environment", default="", help="id of an environment, where the taskset brings none")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of the environment's own config")
    parser.add_argument("--write-tasks", type=Path, help="write the taskset as JSON Lines for upload")
    parser.add_argument("--heldout", type=float, default=0.2, help="share of tasks that is held out")
    parser.add_argument("--max-sessions", type=int, default=64)
    parser.add_argument("--allow-local-code", action="store_true")
    options = parser.parse_args(arguments)
    sys.path.insert(0, "")
    agent = {"harness": {"id": options.harness}, "runtime": {"type": options.runtime}}
    config: Json = {"taskset": {"id": options.taskset}, "id": options.environment, "agent": agent, **options.config}
    environment = VerifiersEnvironment(config)
    environment.check(allow_local_code=options.allow_local_code)
    if options.write_tasks:
        write_tasks(len(environment.tasks), options.write_tasks, heldout=options.heldout)
    environment.start()
    secret = options.secret_file.read_text().strip()
    remote = RemoteServer(environment, secret=secret, max_running=options.max_sessions)
    server = http_server(remote, host=options.host, port=options.port)
    address = f"http://{options.host}:{server.server_address[1]}/"
    sys.stdout.write(f"serving {options.taskset} with {len(environment.tasks)} tasks at {address}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
