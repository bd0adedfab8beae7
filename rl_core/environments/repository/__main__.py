"""Make working environments of repositories: `python -m rl_core.environments.repository --source FOLDER --out FILE`.

A folder with files is one repository: FILE is what was built, as JSON. A folder of folders with a `task.json` each is a
task set: FILE is its JSON Lines. FILE.trees has the snapshots, for `--freeze` on other machines. Exit codes: 0 made,
1 nothing could be made, 2 wrong arguments, 3 no sandbox answers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from rl_core.environments.repository.building import build
from rl_core.environments.repository.reading import read_folder
from rl_core.environments.repository.tasking import ABOUT, make_task, shown, summary
from rl_core.environments.tasks import Task, TaskSet
from rl_core.errors import BuildRefused, SandboxRefused, SpecError, WorldError
from rl_core.sandbox.client import SandboxClient
from rl_core.sandbox.trees import encode_tree, read_index

NOTHING, REFUSED = 1, 3


def main(argv: list[str] | None = None) -> int:
    """Build and write. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    sandbox = SandboxClient(arguments.socket)
    if arguments.freeze:
        return _told(_freeze(sandbox, arguments.freeze))
    if not arguments.source or not arguments.out:
        _parser().error("give --source and --out, or --freeze")
    folders = sorted(path.parent for path in arguments.source.glob(f"*/{ABOUT}"))
    if folders:
        return _told(_tasks(sandbox, folders, arguments.out))
    return _told(_one(sandbox, arguments.source, arguments.out))


def _told(work: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(work)
    except (BuildRefused, SpecError) as error:
        sys.stderr.write(f"{error}\n")
        return NOTHING
    except (WorldError, SandboxRefused) as error:
        sys.stderr.write(f"nothing was built: {error}\n")
        return REFUSED


async def _one(sandbox: SandboxClient, source: Path, out: Path) -> int:
    built, installed = await build(sandbox, read_folder(source))
    out.write_text(shown(msgspec.to_builtins(built)) + "\n")
    _keep(installed.tree, out)
    tests = built.tests
    lines = [
        f"built {source}: snapshot {built.snapshot[:16]}…, {built.files} files, {len(built.wheels)} wheels",
        f"tests   {len(tests.passing)} pass, {len(tests.failing)} fail, {len(tests.flaky)} flaky; {tests.seconds:g} s",
        *(f"flaky   {test}" for test in tests.flaky),
        *(f"left out {path}: {reason}" for path, reason in tests.left_out.items()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


async def _tasks(sandbox: SandboxClient, folders: list[Path], out: Path) -> int:
    made: list[Task] = []
    refused: dict[str, str] = {}
    for folder in folders:
        try:
            task, tree = await make_task(sandbox, folder)
            made.append(task)
            _keep(tree, out)
        except BuildRefused as error:
            refused[folder.name] = str(error)
    sys.stdout.write(shown(summary(made, refused)) + "\n")
    if not made:
        return NOTHING
    out.write_bytes(TaskSet(tuple(made)).to_jsonl())
    return 0


async def _freeze(sandbox: SandboxClient, paths: list[Path]) -> int:
    for path in paths:
        blob = path.read_bytes()
        index = read_index(blob, len(blob))
        tree = {name: blob[start : start + size] for name, (start, size) in index.items()}
        sys.stdout.write(f"{await sandbox.freeze(tree)}\n")
    return 0


def _keep(tree: dict[str, bytes], out: Path) -> None:
    name, blob = encode_tree(tree)
    folder = out.with_name(f"{out.name}.trees")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(blob)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl_core.environments.repository", description="Makes working environments of repositories."
    )
    parser.add_argument("--source", type=Path, help="a repository, or a folder of them")
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--freeze", type=Path, nargs="+", default=[], help="snapshots to register with a sandboxd")
    parser.add_argument("--socket", type=Path, default=Path("var/sandboxd.sock"), help="where sandboxd listens")
    return parser


if __name__ == "__main__":
    sys.exit(main())
