"""Makes a task set: probes every source, screens mutants in rounds, chooses a spread of them, and proves each."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rl_core.environments.mutation.drafts import LEVELS, Draft, draft
from rl_core.environments.mutation.probe import Probed, probe
from rl_core.environments.mutation.proving import prove
from rl_core.environments.mutation.screening import Screen
from rl_core.environments.mutation.sources import Source
from rl_core.environments.mutation.splits import split_sources
from rl_core.environments.mutation.worlds import Worlds
from rl_core.environments.tasks import MAX_LINE_BYTES, TaskSet, parse_task_set
from rl_core.types import Split

_SPARE = 1.25  # drafts for one task wanted: some are refused at the proof
_MAX_ROUNDS = 8
_MIN_TESTS = 6  # of a source, to be worth mutating

Progress = Callable[[str], None]


@dataclass
class Made:
    """A task set with its account: what was dropped and why, and what each source gave."""

    tasks: TaskSet
    tried: int
    dropped: Counter[str]
    by_source: Counter[str]
    by_level: Counter[str]
    by_split: Counter[str]
    skipped: dict[str, str] = field(default_factory=dict)


async def make(worlds: Worlds, sources: Sequence[Source], *, count: int, seed: int, progress: Progress) -> Made:
    """Make up to `count` tasks; fewer come back where the sources give no more. Raises: WorldError."""
    splits = split_sources(sources, seed)
    screens, skipped = await _probe_all(worlds, sources, seed, progress)
    most = max(3, math.ceil(2.5 * count / max(1, len(screens))))  # of one source
    dropped: Counter[str] = Counter()
    waiting: list[Draft] = []
    proven: list[Draft] = []
    for number in range(_MAX_ROUNDS):
        missing = count - len(proven)
        found = await _screen_all(worlds, screens, missing, number, progress)
        if not found and not waiting:
            break
        waiting = _choose(waiting + found, proven, most, len(waiting) + len(found))
        chosen, waiting = waiting[: math.ceil(missing * _SPARE)], waiting[math.ceil(missing * _SPARE) :]
        for one, reason in zip(chosen, await _prove_all(worlds, chosen, progress), strict=True):
            if reason:
                dropped[reason] += 1
            else:
                proven.append(one)
        if len(proven) >= count:
            break
    kept = _choose(proven, [], most, count)
    dropped["not needed"] += len(proven) - len(kept) + len(waiting)
    for screen in screens:
        dropped += screen.dropped
    return _account(kept, splits, screens, dropped, skipped)


async def _probe_all(
    worlds: Worlds, sources: Sequence[Source], seed: int, progress: Progress
) -> tuple[list[Screen], dict[str, str]]:
    done = 0

    async def one(source: Source) -> Probed:
        nonlocal done
        probed = await probe(worlds, source, seed)
        done += 1
        progress(f"probing {done}/{len(sources)} sources")
        return probed

    found = await asyncio.gather(*(one(source) for source in sources))
    skipped = {p.source.name: p.broken or "too few tests" for p in found if len(p.tests) < _MIN_TESTS}
    return [Screen(p, seed) for p in found if len(p.tests) >= _MIN_TESTS], skipped


async def _screen_all(
    worlds: Worlds, screens: Sequence[Screen], missing: int, number: int, progress: Progress
) -> list[Draft]:
    """Drafts of the next edits of every source: more than are missing, since most edits give none."""
    each = max(2, math.ceil(missing * _SPARE * 2 / max(1, len(screens))))
    done = 0

    async def one(screen: Screen) -> list[Draft]:
        nonlocal done
        mutants = await screen.more(worlds, each)
        done += 1
        progress(f"screening {done}/{len(screens)} sources, round {number + 1}")
        return [draft(mutant) for mutant in mutants]

    found = await asyncio.gather(*(one(screen) for screen in screens))
    return [one for drafts in found for one in drafts]


async def _prove_all(worlds: Worlds, drafts: Sequence[Draft], progress: Progress) -> list[str]:
    reasons: list[str] = []
    step = 40
    for start in range(0, len(drafts), step):
        reasons += await prove(worlds, drafts[start : start + step])
        progress(f"proving {len(reasons)}/{len(drafts)} tasks, five times each")
    return reasons


def _choose(drafts: Sequence[Draft], before: Sequence[Draft], most: int, count: int) -> list[Draft]:
    """At most `count` in order of choice: the rarest difficulty first, of it the source with the fewest."""
    levels = Counter(d.level for d in before)
    sources = Counter(d.source.name for d in before)
    pending = {one.id: one for one in drafts if not _too_long(one)}
    chosen: list[Draft] = []
    while pending and len(chosen) < count:
        allowed = [one for one in pending.values() if sources[one.source.name] < most]
        if not allowed:
            break
        best = min(allowed, key=lambda one: (sources[one.source.name], levels[one.level], one.id))
        chosen.append(pending.pop(best.id))
        levels[best.level] += 1
        sources[best.source.name] += 1
    return chosen


def _too_long(one: Draft) -> bool:
    return sum(map(len, one.source.files.values())) > MAX_LINE_BYTES * 3 // 4


def _account(
    kept: Sequence[Draft],
    splits: dict[str, Split],
    screens: Sequence[Screen],
    dropped: Counter[str],
    skipped: dict[str, str],
) -> Made:
    ordered = sorted(kept, key=lambda one: one.id)
    tasks = TaskSet(tuple(one.task(splits[one.source.name]) for one in ordered))
    by_level = Counter({level: sum(one.level == level for one in kept) for level in LEVELS})
    return Made(
        tasks=parse_task_set(tasks.to_jsonl()) if kept else tasks,
        tried=sum(screen.tried for screen in screens),
        dropped=+dropped,
        by_source=Counter(one.source.name for one in kept),
        by_level=by_level,
        by_split=Counter(splits[one.source.name].value for one in kept),
        skipped=skipped,
    )
