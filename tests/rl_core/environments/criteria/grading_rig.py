"""What tests of single criteria need: one trajectory, one criterion, and servers that answer as told."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from ipaddress import ip_network
from typing import Any

from rl_core.destinations import Reach
from rl_core.environments.criteria.outside import Outside, Secret
from rl_core.environments.patch import PATCH, encode_patch
from rl_core.environments.reward import Criterion, CriterionScore, Rubric, grade
from rl_core.environments.tasks import Task
from rl_core.types import Ending, Message, Role, Split, Trajectory

LOOPBACK = Reach([ip_network("127.0.0.0/8")], "GRADER_NETWORKS")


def said(*turns: str, artifacts: dict[str, str] | None = None, question: str = "What is it?") -> Trajectory:
    messages = [Message(role=Role.USER, content=question)]
    messages += [Message(role=Role.ASSISTANT, content=turn, segment=0) for turn in turns]
    return Trajectory(task_id="t1", messages=messages, segments=[], ending=Ending.TERMINATED, artifacts=artifacts or {})


def changed(**files: Any) -> Trajectory:
    """A trajectory whose patch has these files; `__` stands for a slash and `_py` for `.py` in their names."""
    names = {name: name.replace("__", "/").replace("_py", ".py") for name in files}
    return patched({names[name]: content for name, content in files.items()})


def patched(files: dict[str, str | None]) -> Trajectory:
    layer = {path: None if text is None else text.encode() for path, text in files.items()}
    return said("done", artifacts={PATCH: encode_patch(layer)})


async def scored(kind: str, params: dict[str, Any], trajectory: Trajectory, **given: Any) -> CriterionScore:
    """The score of one criterion. `files` and `reference` make the task; the rest goes to the grader."""
    task = Task(
        id="t1",
        split=Split.TRAIN,
        input={"question": "What is it?", **({"files": given.pop("files")} if "files" in given else {})},
        reference=given.pop("reference", {"answer": "6"}),
    )
    task = given.pop("task", task)
    watched = kind in ("test_gap", "impossible_passed", "tests_touched")
    criteria = [Criterion(key="k", text=given.pop("asked", "It is good"), kind=kind, weight=not watched, params=params)]
    if watched:
        criteria.append(Criterion(key="other", text="", kind="tool_ran", weight=1))
    rubric = Rubric(slug="r", criteria=tuple(criteria))
    return (await grade(rubric, task=task, trajectory=trajectory, sandbox=given.pop("sandbox", None), **given))[0]


Answer = tuple[int, bytes]


class Server(ThreadingHTTPServer):
    """Answers every POST with what `reply` makes of its body; keeps headers and bodies."""

    daemon_threads = True

    def __init__(self, reply: Callable[[dict[str, Any]], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.slow_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def outside(self, **secrets: str) -> Outside:
        return Outside(LOOPBACK, {name: Secret(value=value, origin=self.url) for name, value in secrets.items()})


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
        time.sleep(self.server.slow_s)
        status, answer = self.server.reply(json.loads(body))
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(answer)

    def do_GET(self) -> None:
        self.server.got.append(({}, self.path.encode()))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@contextlib.contextmanager
def serving(reply: Callable[[dict[str, Any]], Answer]) -> Iterator[Server]:
    server = Server(reply)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def package_tree(folder: str, *names: str) -> dict[str, bytes]:
    """Files of installed pure-Python packages, under a folder of a tree."""
    tree: dict[str, bytes] = {}
    for name in names:
        for file in metadata.files(name) or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                tree[f"{folder}/{file}"] = file.locate().read_bytes()  # type: ignore[attr-defined]
    return tree


PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
