"""Unit tests over the exported patch, as far as they can be believed when they run beside what they test.

The policy's code is in the process that reports. So: the test files and all that says how tests run are the task's, not
the policy's; the ids must be exactly those of the reference; a planted test of an unguessable name must fail, and one
must pass; and the time that the tests claim must fit in the time that was taken outside, which in turn must not be far
shorter than tests of this set can take. An oracle is stronger where there is one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from rl_core.environments.criteria.graded import Graded, Params, Verdict
from rl_core.environments.criteria.patched import last_line, patched, run_limits, run_over, runs_tests
from rl_core.environments.judgement import Judgement
from rl_core.environments.patch import exported_patch
from rl_core.errors import PatchRefused, TaskSetError
from rl_core.sandbox.protocol import Layer, Outcome, RunLimits, RunResult, Sandbox

MAX_TESTS = 2000
_INSIDE = {"inside.py": Path(__file__).with_name("inside.py").read_bytes()}
_SHORT_S = 0.5  # recorded times below this say nothing

Row = tuple[str, str, float]


class TestsWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`unit_tests` of a reference. `files` are the test files as they must be, by path.

    `hidden` are those of the ids that the policy does not see. `packages` are folders of the tree that tests import
    from; `seconds` is what an honest run took, 0 unknown.
    """

    __test__ = False

    ids: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_TESTS)]
    files: dict[str, str]
    hidden: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    seconds: float = 0.0


class UnitTestsParams(Params, frozen=True):
    """Bounds of the run. `fastest` is the share of an honest run's time below which nobody believes the tests ran."""

    wall_s: float = 60.0
    memory_mib: int = 512
    fastest: float = 0.1

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> RunLimits:
        """Of its run. Raises: SpecError."""
        return run_limits(wall_s=self.wall_s, memory_mib=self.memory_mib)


async def unit_tests(graded: Graded, params: UnitTestsParams) -> Verdict:
    """1 when exactly the wanted tests pass, believably."""
    wanted = _wanted(graded)
    passing, reason = await _passing(graded, wanted, params)
    if reason:
        return Verdict(0.0, reason)
    failed = sorted(set(wanted.ids) - passing)
    if failed:
        return Verdict(0.0, f"{len(failed)} of {len(wanted.ids)} tests do not pass, first {failed[0][:120]}")
    return Verdict(1.0, f"all {len(wanted.ids)} tests pass")


async def judge_tests(graded: Graded) -> Judgement:
    """Shares of the visible and the hidden ids that pass; both 0 where the report is not believed."""
    wanted = _wanted(graded)
    passing, reason = await _passing(graded, wanted, UnitTestsParams())
    visible = [test for test in wanted.ids if test not in wanted.hidden]
    failed = sorted(set(wanted.ids) - passing)
    return Judgement(
        visible=_share(visible, passing),
        hidden=_share(wanted.hidden, passing),
        first_failure=reason or (failed[0][:120] if failed else ""),
    )


async def _passing(graded: Graded, wanted: TestsWanted, params: UnitTestsParams) -> tuple[set[str], str]:
    """The wanted tests that pass; none of them, and why, where the run is not believed."""
    planted = f"test_{secrets.token_hex(8)}.py"
    patch: Layer = {
        path: content
        for path, content in exported_patch(graded.trajectory.artifacts).items()
        if not runs_tests(path) and not any(_in_the_way(path, test) for test in wanted.files)
    }
    restored = {path: text.encode() for path, text in wanted.files.items()} | {planted: _plant()}
    base, layer = patched(graded.task, patch, restored=restored)
    try:
        result = await run_tests(
            graded.need_sandbox(),
            tests=[*wanted.ids, planted],
            packages=wanted.packages,
            base=base,
            layer=layer,
            limits=params.limits(),
        )
    except PatchRefused as error:
        if not patch:  # then it is the task that does not fit
            raise
        return set(), str(error)[:200]
    rows = read_rows(result)
    if isinstance(rows, str):
        return set(), rows
    fails, passes = f"{planted}::test_fails", f"{planted}::test_passes"
    reason = _unbelievable(rows, {*wanted.ids, fails, passes}, fails, passes)
    reason = reason or _untimely(rows, result.wall_s, wanted.seconds * params.fastest)
    passing = {test for test, outcome, _ in rows if outcome == "passed"} & set(wanted.ids)
    return (set(), reason) if reason else (passing, "")


def _in_the_way(path: str, test: str) -> bool:
    """Whether a policy's file is one of the tests', or stands where its folder or something below it would."""
    return path == test or test.startswith(f"{path}/") or path.startswith(f"{test}/")


async def run_tests(
    sandbox: Sandbox, *, tests: Sequence[str], packages: Sequence[str], base: str, layer: Layer, limits: RunLimits
) -> RunResult:
    """Run tests, by id or file, over a tree in a fresh sandbox; without any, all that pytest finds.

    Raises: PatchRefused, WorldError.
    """
    return await run_over(
        sandbox,
        ["python3", "-I", "-S", "/work/inside.py"],
        files=_INSIDE,
        stdin=json.dumps({"packages": list(packages), "tests": list(tests)}).encode(),
        base=base,
        layer=layer,
        limits=limits,
    )


def _share(tests: Sequence[str], passing: set[str]) -> float:
    return sum(test in passing for test in tests) / len(tests) if tests else 1.0


def read_rows(result: RunResult) -> list[Row] | str:
    """What a run of `inside.py` said: test, outcome, seconds; or why that does not count."""
    if result.outcome is not Outcome.OK:
        return f"the tests were ended: {result.outcome.value}"
    try:
        rows = msgspec.json.decode(result.stdout, type=list[Row])
    except (msgspec.DecodeError, UnicodeError):
        return f"the tests gave no report: {last_line(result)}"
    return rows


def _plant() -> bytes:
    one, other = secrets.token_hex(8), secrets.token_hex(8)
    return f"""def test_fails():
    assert {one!r} == {other!r}


def test_passes():
    assert {one!r} == {one!r}
""".encode()


def _wanted(graded: Graded) -> TestsWanted:
    try:
        return msgspec.convert(graded.reference("unit_tests"), TestsWanted)
    except msgspec.ValidationError as error:
        raise TaskSetError(f"task {graded.task.id}: reference.unit_tests: {error}") from error


def _unbelievable(rows: list[Row], expected: set[str], fails: str, passes: str) -> str:
    """Why a report is not what running these tests gives; or nothing."""
    outcomes = {test: outcome for test, outcome, _ in rows}
    if len(outcomes) != len(rows) or set(outcomes) != expected:
        missing, more = sorted(expected - set(outcomes)), sorted(set(outcomes) - expected)
        return f"other tests ran than wanted: {len(missing)} missing, {len(more)} more, {len(rows)} reported"
    if outcomes[fails] != "failed":
        return "a planted test that must fail did not: the tests are not believed"
    if outcomes[passes] != "passed":
        return "a planted test that must pass did not: the tests are not believed"
    return ""


def _untimely(rows: list[Row], wall_s: float, least_s: float) -> str:
    """Why the time taken outside does not fit; or nothing."""
    claimed = sum(seconds for _, _, seconds in rows)
    if not 0 <= claimed <= wall_s + 0.05:
        return f"the tests claim {claimed:.2f} s of {wall_s:.2f} s"
    if least_s >= _SHORT_S * 0.1 and wall_s < least_s:
        return f"the tests took {wall_s:.2f} s, and cannot take less than {least_s:.2f} s"
    return ""
