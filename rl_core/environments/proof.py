"""Whether a task is what it says: its tests fail before the fix and pass with its solution, each time alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

import msgspec

RUNS = 5


class ProofVerdict(StrEnum):
    """What running a task's own tests says of it."""

    HOLDS = "holds"
    PASSES_BEFORE = "passes_before"  # there is nothing to repair
    REFERENCE_FAILS = "reference_fails"  # the reference solution does not pass
    FLAKY = "flaky"  # equal runs came out differently


class Proof(msgspec.Struct, frozen=True):
    """A verdict and what it rests on, bounded, safe to show."""

    verdict: ProofVerdict
    detail: str = ""


async def prove(run: Callable[[bool], Awaitable[bool]]) -> Proof:
    """Run a task's tests RUNS times before the fix, and as often with the reference solution.

    `run(solved)` runs them once, in a fresh world, and says whether they passed. Raises what it raises: a world that
    fails is no verdict.
    """
    before = [await run(False) for _ in range(RUNS)]
    after = [await run(True) for _ in range(RUNS)]
    return judged(before, after)


def judged(before: Sequence[bool], after: Sequence[bool]) -> Proof:
    """The verdict of what came of equal runs. Flakiness comes first: it makes the other two uncertain."""
    for runs, what in ((before, "before the fix"), (after, "with the reference solution")):
        if len(set(runs)) > 1:
            return Proof(ProofVerdict.FLAKY, f"{what} {sum(runs)} of {len(runs)} equal runs passed")
    if all(before):
        return Proof(ProofVerdict.PASSES_BEFORE, f"all {len(before)} runs passed before the fix")
    if not all(after):
        return Proof(ProofVerdict.REFERENCE_FAILS, f"no run of {len(after)} passed with the reference solution")
    return Proof(ProofVerdict.HOLDS)
