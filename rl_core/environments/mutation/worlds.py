"""Batches of repositories in one world: many subjects a start, each in a process of its own, answers read as data."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
from pathlib import Path
from typing import Any

import msgspec

from rl_core.environments.mutation.calls import Call
from rl_core.environments.mutation.sources import Source
from rl_core.errors import WorldError
from rl_core.sandbox.protocol import MIB, Outcome, RunLimits, RunResult, Sandbox

_HERE = Path(__file__).parent
_FILES = {
    "child.py": (_HERE / "child.py").read_bytes(),
    **{f"rl_core/environments/mutation/{name}": (_HERE / name).read_bytes() for name in ("values.py", "sealing.py")},
}
LIMITS = RunLimits(
    wall_s=300.0,
    cpu_s=300,
    memory_bytes=1024 * MIB,
    pids=32,
    disk_bytes=64 * MIB,
    output_bytes=16 * MIB,
    artifact_files=0,
)
BATCH = 24  # subjects a world


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """One repository and what is asked of it: calls, or one test file by its name. `files` replace the source's.

    `sealed` hides the standard library's own module of the source's name from the repository's process.
    """

    source: Source
    calls: list[Call] = []
    files: dict[str, str] = {}
    test: str = ""
    modules: list[str] = []
    traced: bool = False
    sealed: bool = False


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in the order of the calls, None where none came; and the end: done, broken, hangs or dies."""

    answers: list[dict[str, Any] | None]
    end: str
    detail: str = ""


class Worlds:
    """Runs subjects through a sandbox. `run` numbers a repetition: it sets hash seed, clock, folder and order."""

    def __init__(self, sandbox: Sandbox, *, at_once: int = max(2, os.cpu_count() or 2)) -> None:
        self._sandbox = sandbox
        self._slots = asyncio.Semaphore(at_once)
        self.started = 0

    async def ask(self, subjects: list[Subject], *, run: int) -> list[Reply]:
        """Replies in the order of the subjects. Raises: WorldError when the sandbox itself failed."""
        batches = [subjects[i : i + BATCH] for i in range(0, len(subjects), BATCH)]
        replies = await asyncio.gather(*(self._ask(batch, run) for batch in batches))
        return [reply for batch in replies for reply in batch]

    async def _ask(self, subjects: list[Subject], run: int) -> list[Reply]:
        async with self._slots:
            self.started += 1
            result, replies = await run_subjects(self._sandbox, subjects, run=run, limits=LIMITS)
        if result.outcome is not Outcome.OK or result.exit_code != 0:
            raise WorldError(
                f"a world of {len(subjects)} repositories ended with {result.outcome.value} {result.exit_code}: "
                f"{result.stderr.decode(errors='replace')[-300:]}"
            )
        return replies


async def run_subjects(
    sandbox: Sandbox, subjects: list[Subject], *, run: int, limits: RunLimits
) -> tuple[RunResult, list[Reply]]:
    """One world: how it ended, and the replies that came out of it. Raises: WorldError when it does not start."""
    rng = random.Random(run)
    bases = {subject.source.name: subject.source.files for subject in subjects}
    requests = [_request(subject, rng, run) for subject in subjects]
    job = {"run": run, "bases": bases, "subjects": [request for request, _ in requests]}
    result = await sandbox.run(
        ["python3", "-S", "-s", "child.py", str(run)],
        files=_FILES,
        stdin=json.dumps(job).encode(),
        limits=limits,
    )
    said = _messages(result.stdout, len(subjects))
    return result, [_reply(messages, ids) for messages, (_, ids) in zip(said, requests, strict=True)]


def _request(subject: Subject, rng: random.Random, run: int) -> tuple[dict[str, Any], list[str]]:
    """What the child is told, with the ids of the calls in their order; they are asked in another."""
    count = 1 if subject.test else len(subject.calls)
    ids = [secrets.token_hex(8) for _ in range(count)]
    if subject.test:
        cases = [{"id": ids[0], "name": subject.test, "test": subject.files[subject.test]}]
    else:
        cases = [call.request(case_id) for call, case_id in zip(subject.calls, ids, strict=True)]
    if run:
        rng.shuffle(cases)
    request = {
        "base": subject.source.name,
        "files": subject.files,
        "blocked": subject.source.blocked,
        "roots": subject.source.roots,
        "modules": subject.modules or sorted({call.module for call in subject.calls}),
        "cases": cases,
        "traced": subject.traced,
        "clock": run % 5,
        "original": subject.source.name if subject.sealed else "",
    }
    return request, ids


def _messages(stdout: bytes, count: int) -> list[list[dict[str, Any]]]:
    """The child's lines by subject. They may come from hostile code: what is not well formed was not said."""
    said: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    for line in stdout.splitlines():
        try:
            message = json.loads(line)
            said[message["subject"]].append({str(key): value for key, value in message["said"].items()})
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            continue
    return said


def _reply(messages: list[dict[str, Any]], ids: list[str]) -> Reply:
    by_id: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        by_id.setdefault(str(message.get("id")), []).append(message)
    ends = [message for message in messages if "end" in message]
    end, detail = (str(ends[-1]["end"]), str(ends[-1].get("detail", ""))) if ends else ("dies", "")
    # An id that is answered twice is not answered.
    answers = [by_id[case_id][0] if len(by_id.get(case_id, [])) == 1 else None for case_id in ids]
    return Reply(answers=answers, end=end, detail=detail)
