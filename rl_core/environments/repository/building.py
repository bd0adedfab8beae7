"""Makes a working environment of a repository: its files, its dependencies, which of its tests pass, and a snapshot.

Everything of the repository runs in worlds: dependencies are unpacked in one, tests run five times, each in another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from statistics import median
from typing import Final

import msgspec

from rl_core.environments.criteria.patched import last_line
from rl_core.environments.criteria.unit_tests import Row, read_rows, run_tests
from rl_core.environments.repository.wheels import download, requirements_of
from rl_core.errors import BuildRefused
from rl_core.sandbox.protocol import MIB, Layer, Outcome, RunLimits, Sandbox

PACKAGES: Final = ".packages"
RUNS: Final = 5
INSTALL_LIMITS: Final = RunLimits(
    wall_s=120.0,
    cpu_s=120,
    memory_bytes=1024 * MIB,
    disk_bytes=512 * MIB,
    artifact_files=0,
    layer_files=10_000,
    layer_bytes=64 * MIB,
)
TEST_LIMITS: Final = RunLimits(
    wall_s=120.0,
    cpu_s=120,
    memory_bytes=1024 * MIB,
    disk_bytes=512 * MIB,
    output_bytes=4 * MIB,
    artifact_files=0,
    layer_files=10_000,
    layer_bytes=64 * MIB,
)
_TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")
_MAX_TEST_FILES = 200

Download = Callable[[Iterable[str]], Mapping[str, bytes]]


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a repository's tests in RUNS runs, by id. `seconds` is the median of the runs' time.

    `left_out` are test files that could not be run to their end, each with the reason.
    """

    passing: tuple[str, ...]
    failing: tuple[str, ...]
    flaky: tuple[str, ...]
    seconds: float
    left_out: dict[str, str] = {}


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A repository that works. `snapshot` names its files with its dependencies under `packages`."""

    snapshot: str
    packages: tuple[str, ...]
    requirements: tuple[str, ...]
    wheels: tuple[str, ...]
    files: int
    bytes: int
    tests: Outcomes


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """Files with dependencies, and where tests import from."""

    tree: dict[str, bytes]
    packages: tuple[str, ...]
    requirements: tuple[str, ...]
    wheels: tuple[str, ...]


async def build(sandbox: Sandbox, tree: Mapping[str, bytes], *, fetch: Download = download) -> tuple[Built, Installed]:
    """Install, test, freeze. Raises: BuildRefused, WorldError."""
    installed = await install(sandbox, tree, fetch=fetch)
    snapshot = await sandbox.freeze(installed.tree)
    tests = await observe(sandbox, snapshot, {}, installed.packages, files=list(tree))
    if not tests.passing:
        raise BuildRefused(f"no test passes {RUNS} times out of {RUNS}: {_why(tests)}")
    built = Built(
        snapshot=snapshot,
        packages=installed.packages,
        requirements=installed.requirements,
        wheels=installed.wheels,
        files=len(installed.tree),
        bytes=sum(map(len, installed.tree.values())),
        tests=tests,
    )
    return built, installed


async def install(sandbox: Sandbox, tree: Mapping[str, bytes], *, fetch: Download = download) -> Installed:
    """The tree with its dependencies unpacked into it, inside a world. Raises: BuildRefused, WorldError."""
    if any(path == PACKAGES or path.startswith(f"{PACKAGES}/") for path in tree):
        raise BuildRefused(f"the repository has a {PACKAGES} of its own")
    requirements = requirements_of(tree)
    wheels = fetch(requirements)
    script = resources.files("rl_core.environments.repository").joinpath("inside_install.py").read_bytes()
    result = await sandbox.run(
        ["python3", "-I", "-S", "/work/inside_install.py", PACKAGES],
        files={"inside_install.py": script, **{f"wheels/{name}": content for name, content in wheels.items()}},
        layer={},
        limits=INSTALL_LIMITS,
        client="building",
    )
    if result.outcome is not Outcome.OK or result.exit_code != 0 or result.layer is None:
        why = result.layer_refused or f"{result.outcome.value}: {last_line(result)}"
        raise BuildRefused(f"its dependencies cannot be installed: {why}")
    packed = {path: content for path, content in result.layer.items() if content is not None}
    sources = ("src",) if any(path.startswith("src/") for path in tree) else ()
    return Installed(
        tree={**tree, **packed},
        packages=(*sources, PACKAGES),
        requirements=tuple(requirements),
        wheels=tuple(sorted(wheels)),
    )


async def observe(
    sandbox: Sandbox, snapshot: str, layer: Layer, packages: Sequence[str], *, files: Sequence[str]
) -> Outcomes:
    """What came of the tests of a tree (`files` are its own) in RUNS fresh worlds. Raises: BuildRefused, WorldError.

    They run all at once; where that does not end as it should, file by file, so that one bad file costs only itself.
    """
    first = await _once(sandbox, snapshot, layer, packages, [])
    if not isinstance(first, str):
        runs = [first] + [await _once(sandbox, snapshot, layer, packages, []) for _ in range(RUNS - 1)]
        whole = [run for run in runs if not isinstance(run, str)]
        if len(whole) == RUNS:
            return _sorted_out([run.rows for run in whole], median(run.seconds for run in whole), {})
    named = sorted(path for path in files if _TEST_FILE.search(path))
    if not named:
        raise BuildRefused(f"its tests do not run: {first if isinstance(first, str) else 'they end differently'}")
    if len(named) > _MAX_TEST_FILES:
        raise BuildRefused(f"its tests do not run together, and it has more than {_MAX_TEST_FILES} files of them")
    left_out: dict[str, str] = {}
    rows: list[list[Row]] = [[] for _ in range(RUNS)]
    seconds = 0.0
    for path in named:
        runs = [await _once(sandbox, snapshot, layer, packages, [path]) for _ in range(RUNS)]
        ended = [run for run in runs if isinstance(run, str)]
        if ended:
            left_out[path] = ended[0]
            continue
        good = [run for run in runs if not isinstance(run, str)]
        seconds += median(run.seconds for run in good)
        for mine, run in zip(rows, good, strict=True):
            mine += run.rows
    return _sorted_out(rows, seconds, left_out)


class _Run(msgspec.Struct, frozen=True):
    rows: list[Row]
    seconds: float


async def _once(
    sandbox: Sandbox, snapshot: str, layer: Layer, packages: Sequence[str], tests: Sequence[str]
) -> _Run | str:
    """One run of the tests; or why it is none."""
    result = await run_tests(sandbox, tests=tests, packages=packages, base=snapshot, layer=layer, limits=TEST_LIMITS)
    rows = read_rows(result)
    return rows if isinstance(rows, str) else _Run(rows, result.wall_s)


def _sorted_out(runs: list[list[Row]], seconds: float, left_out: dict[str, str]) -> Outcomes:
    """Passing, failing, flaky. A test that is missing from a run, or is named twice in one, is flaky."""
    seen: dict[str, list[str]] = {}
    for rows in runs:
        for test, outcome, _ in rows:
            seen.setdefault(test, []).append(outcome)
    sorts: dict[str, list[str]] = {"passing": [], "failing": [], "flaky": []}
    for test, outcomes in sorted(seen.items()):
        if len(outcomes) != len(runs) or len(set(outcomes)) > 1:
            sorts["flaky"].append(test)
        elif outcomes[0] != "skipped":
            sorts["passing" if outcomes[0] == "passed" else "failing"].append(test)
    return Outcomes(
        passing=tuple(sorts["passing"]),
        failing=tuple(sorts["failing"]),
        flaky=tuple(sorts["flaky"]),
        seconds=round(seconds, 3),
        left_out=left_out,
    )


def _why(tests: Outcomes) -> str:
    reasons = [f"{path}: {reason}" for path, reason in tests.left_out.items()]
    return reasons[0] if reasons else f"{len(tests.failing)} fail, {len(tests.flaky)} are flaky"
