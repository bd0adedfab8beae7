"""The proof of a task: five repetitions, each in fresh worlds with another hash seed, clock, folder and order of tests.

Before the fix the visible test fails, as a call and as a file, and so do at least two hidden ones, in the same way each
time; with the original everything passes, each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rl_core.environments.mutation.calls import canonical
from rl_core.environments.mutation.drafts import TEST_FILE, Draft
from rl_core.environments.mutation.worlds import Reply, Subject, Worlds

RUNS = 5
_PASSED = canonical({"value": "passed"})
_SUBJECTS = 4  # a draft: calls and file, before and after


async def prove(worlds: Worlds, drafts: Sequence[Draft]) -> list[str]:
    """For each draft an empty string, or why it is refused. Raises: WorldError."""
    subjects = [subject for draft in drafts for subject in _subjects(draft)]
    runs = await asyncio.gather(*(worlds.ask(subjects, run=run) for run in range(1, RUNS + 1)))
    reasons = []
    for number, draft in enumerate(drafts):
        place = number * _SUBJECTS
        reasons.append(verdict(draft, [replies[place : place + _SUBJECTS] for replies in runs]))
    return reasons


def _subjects(draft: Draft) -> list[Subject]:
    calls = [draft.visible.call, *(test.call for test in draft.hidden)]
    modules = sorted({call.module for call in calls})
    test = {TEST_FILE: draft.files[TEST_FILE]}
    return [
        Subject(source=draft.source, calls=calls, files=draft.files),
        Subject(source=draft.source, calls=calls),
        Subject(source=draft.source, test=TEST_FILE, files=draft.files, modules=modules),
        Subject(source=draft.source, test=TEST_FILE, files=test, modules=modules),
    ]


def verdict(draft: Draft, runs: Sequence[Sequence[Reply]]) -> str:
    """Why a draft is refused, from the replies before, after, and of the test file before and after; or nothing."""
    expected = [canonical(test.expected) for test in (draft.visible, *draft.hidden)]
    before, after, file_before, file_after = (
        [tuple(canonical(answer or {}) for answer in replies[part].answers) for replies in runs]
        for part in range(_SUBJECTS)
    )
    if len(set(before)) > 1 or len(set(after)) > 1 or len(set(file_before)) > 1 or len(set(file_after)) > 1:
        return "flaky"
    if list(after[0]) != expected or file_after[0] != (_PASSED,):
        return "fails with the original"
    if any(reply.end != "done" for replies in runs for reply in replies):
        return "does not end well"
    failing = [given != wanted for given, wanted in zip(before[0], expected, strict=True)]
    if not any(failing) and file_before[0] == (_PASSED,):
        return "equivalent"
    if not failing[0] or file_before[0] == (_PASSED,):
        return "passes before the fix"
    return "" if sum(failing[1:]) >= 2 else "too few failing tests"
