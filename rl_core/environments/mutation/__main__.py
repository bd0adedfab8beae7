"""Make bug-repair tasks: `python -m rl_core.environments.mutation --count 200 --seed 0 --out FILE`.

Exit codes: 0 made, 1 fewer tasks than asked for, 2 wrong arguments, 3 no sandbox answers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from rl_core.environments.mutation.making import Made, make
from rl_core.environments.mutation.sources import Source, find_sources
from rl_core.environments.mutation.worlds import Worlds
from rl_core.environments.packed import pack
from rl_core.errors import SandboxRefused, WorldError
from rl_core.sandbox.client import SandboxClient

FEWER, WRONG, REFUSED = 1, 2, 3


def main(argv: list[str] | None = None) -> int:
    """Make tasks and write them. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        sources = find_sources(name for name in arguments.sources.split(",") if name)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG
    started = time.monotonic()
    worlds = Worlds(SandboxClient(arguments.socket))
    try:
        made = asyncio.run(_make(worlds, arguments, sources))
    except (WorldError, SandboxRefused) as error:
        sys.stderr.write(f"\nno tasks were made: {error}\n")
        return REFUSED
    packed = arguments.out.suffix == ".zst"
    arguments.out.write_bytes(pack(made.tasks) if packed else made.tasks.to_jsonl())
    sys.stderr.write("\n")
    sys.stdout.write(summary(made, arguments.count, time.monotonic() - started, worlds.started))
    return 0 if len(made.tasks.tasks) == arguments.count else FEWER


async def _make(worlds: Worlds, arguments: argparse.Namespace, sources: list[Source]) -> Made:
    await SandboxClient(arguments.socket).health()  # said at once, not after the work that comes first
    return await make(worlds, sources, count=arguments.count, seed=arguments.seed, progress=_progress)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl_core.environments.mutation", description="Makes bug-repair tasks by mutating real Python."
    )
    parser.add_argument("--count", type=_positive, default=200, help="tasks wanted")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal tasks on one installation")
    parser.add_argument(
        "--out", type=Path, required=True, help="the JSON Lines file to write; packed where its name ends in .zst"
    )
    parser.add_argument("--sources", default="", help="names of modules and packages, by comma; all by default")
    parser.add_argument("--socket", type=Path, default=Path("var/sandboxd.sock"), help="where sandboxd listens")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError("a number from 1 to 10000")
    return int(text)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{line:<70}")
    else:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def summary(made: Made, wanted: int, seconds: float, worlds: int) -> str:
    """What was made, what was dropped and why, and what each source gave."""
    tasks = len(made.tasks.tasks)
    lines = [
        f"made {tasks} of {wanted} tasks from {len(made.by_source)} sources in {seconds:.0f} s, {worlds} worlds",
        f"content hash {made.tasks.content_hash}",
        "split       " + _counts(made.by_split),
        "difficulty  " + _counts(made.by_level),
        f"mutations   {made.tried} tried",
        "dropped     " + _counts(made.dropped),
        "per source  " + _counts(made.by_source),
    ]
    if made.skipped:
        lines.append("skipped     " + ", ".join(f"{name} ({why})" for name, why in sorted(made.skipped.items())))
    return "\n".join(lines) + "\n"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.items()) or "none"


if __name__ == "__main__":
    sys.exit(main())
