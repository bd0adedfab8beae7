"""`python -m benchmarks NAME [--quick]`, or `--all` to run every benchmark; both rewrite `benchmarks/RESULTS.md`.

Progress goes to stderr, one JSON object to the last line of stdout. A whole run is kept in `var/benchmarks/NAME.json`
and takes its section's place in RESULTS.md, whose other sections stay as they are; a quick one is printed alone. Exit
status: 0, 1 when a benchmark failed, 2 for an unknown name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import structlog

import benchmarks
from benchmarks.measure import host
from rl_core.errors import RlCoreError

_RESULTS = Path(__file__).with_name("RESULTS.md")
_KEPT = Path("var/benchmarks")
_HEAD = "# Benchmark results\n\nWritten by `python -m benchmarks NAME` and `make bench`; do not edit.\n"
_NOT_BENCHMARKS = {"__main__", "measure"}


def names() -> list[str]:
    """Every benchmark: the modules of this package that have a `run`. Found by their text, without importing them."""
    found = []
    for module in pkgutil.iter_modules(benchmarks.__path__):
        source = Path(benchmarks.__path__[0]) / f"{module.name}.py"
        if module.name not in _NOT_BENCHMARKS and source.is_file() and "\ndef run(" in source.read_text():
            found.append(module.name)
    return sorted(found)


def run_one(name: str, *, quick: bool) -> dict[str, object]:
    """Run one benchmark in this process and complete its result with host, mode and duration."""
    started = time.perf_counter()

    def progress(message: str) -> None:
        print(f"[{name} {time.perf_counter() - started:6.1f} s] {message}", file=sys.stderr, flush=True)

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for the result
    progress("starting")
    result = dict(importlib.import_module(f"benchmarks.{name}").run(quick=quick, progress=progress))
    result |= {"host": host(), "quick": quick, "seconds": round(time.perf_counter() - started, 1)}
    progress("done")
    return result


def keep(name: str, result: dict[str, object]) -> None:
    """Keep a whole run's result, and put it into RESULTS.md."""
    _KEPT.mkdir(parents=True, exist_ok=True)
    dated = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", **result}
    (_KEPT / f"{name}.json").write_text(json.dumps(dated))
    present = _RESULTS.read_text() if _RESULTS.is_file() else ""
    _RESULTS.write_text(_with_section(present, name, dated))


def run_all(*, quick: bool) -> int:
    """Run each benchmark in a process of its own, so that none inherits another's memory."""
    ran: list[str] = []
    failed: list[str] = []
    for name in names():
        command = [sys.executable, "-m", "benchmarks", name, *(["--quick"] if quick else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        (failed if done.returncode else ran).append(name)
    print(json.dumps({"results": str(_RESULTS), "ran": ran, "failed": failed}))
    return 1 if failed else 0


def _with_section(text: str, name: str, result: dict[str, object]) -> str:
    """RESULTS.md with the result in its section; those of other benchmarks that still exist stay as they are."""
    kept = {part.partition("\n")[0]: f"## {part.strip()}\n" for part in text.split("\n## ")[1:]}
    kept[name] = _section(name, result)
    return "\n".join([_HEAD, *(kept[one] for one in names() if one in kept)])


def _section(name: str, result: dict[str, object]) -> str:
    machine = result["host"]
    assert isinstance(machine, dict)
    rows = [(key, value) for key, value in result.items() if key not in {"date", "host", "quick", "seconds"}]
    lines = [
        f"## {name}",
        "",
        f"{result['date']} on {machine['model']}, {machine['cores']} cores, {result['seconds']} s.",
        "",
        "| key | value |",
        "|---|---|",
        *(f"| `{key}` | {_cell(value)} |" for key, value in rows),
    ]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def main(arguments: list[str]) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="the same measurements on less, within 3 minutes")
    parser.add_argument("--all", action="store_true", help="run all")
    options = parser.parse_args(arguments)
    if options.all:
        return run_all(quick=options.quick)
    if options.name not in names():
        what = f"unknown benchmark {options.name!r}" if options.name else "name a benchmark, or --all"
        print(f"{what}; there are: {', '.join(names())}", file=sys.stderr)
        return 2
    try:
        result = run_one(options.name, quick=options.quick)
    except RlCoreError as error:
        print(f"{options.name} cannot run: {error}", file=sys.stderr)
        return 1
    if not options.quick:
        keep(options.name, result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
