"""Finds the tests of a source: calls that the original answers, the same every time, and the lines that each runs."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from rl_core.environments.mutation.calls import Call, Test, Tree, canonical, tags
from rl_core.environments.mutation.inputs import Inputs, Kinds
from rl_core.environments.mutation.sources import Source
from rl_core.environments.mutation.surface import Callable, Surface, read_surface
from rl_core.environments.mutation.worlds import Reply, Subject, Worlds

_TRIES, _MORE = 60, 90  # calls a callable, before and after it is known what works
_KEPT_PER_SOURCE = 320
_SAME_ANSWER, _RAISING = 3, 4  # most tests of one callable with the same answer, and that expect an exception
_UNMEANT = frozenset(
    ("TypeError", "AttributeError", "NotImplementedError", "RecursionError", "NameError", "IndexError", "KeyError")
)


Lines = frozenset[tuple[str, int]]


@dataclass
class Probed:
    """A source with its tests, and the lines that each of them runs; `broken` says why it does not import, if so."""

    source: Source
    tests: list[Test] = field(default_factory=list)
    lines: list[Lines] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    broken: str = ""


@dataclass
class _Trial:
    """One callable while it is tried."""

    target: Callable
    kinds: list[Kinds | None] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    good: list[tuple[Kinds, Tree]] = field(default_factory=list)
    answered: list[tuple[Call, dict[str, Any]]] = field(default_factory=list)
    broken: str = ""


async def probe(worlds: Worlds, source: Source, seed: int) -> Probed:
    """Try the source's public callables; keep the calls that tell something. Raises: WorldError."""
    rng = random.Random(f"{seed}:{source.name}")
    surface = read_surface(source)
    inputs = Inputs(surface, rng)
    makers = [_Trial(t) for t in surface.callables if t.owner and t.name == "__init__"]
    await _make_objects(worlds, source, makers, inputs)
    trials = [_Trial(t) for t in surface.callables if t.name != "__init__"]
    for trial in trials:
        _add_examples(trial, surface)
        for _ in range(_TRIES):
            _add_call(trial, inputs, trial.target, inputs.kinds_for(trial.target), rng)
    await _ask(worlds, source, trials)
    for trial in trials:
        trial.calls, trial.kinds = [], []
        for _ in range(_MORE if trial.good else 0):
            kinds, _owner = rng.choice(trial.good)
            _add_call(trial, inputs, trial.target, kinds, rng)
    await _ask(worlds, source, [trial for trial in trials if trial.calls])
    return await _steady(worlds, source, trials)


async def _make_objects(worlds: Worlds, source: Source, makers: list[_Trial], inputs: Inputs) -> None:
    """Find arguments that the classes' constructors take, by calling a harmless method of what they make."""
    for trial in makers:
        for _ in range(_TRIES):
            kinds = inputs.kinds_for(trial.target)
            made = inputs.call(trial.target, kinds, None)
            if not made.kwargs:  # a tree of an object has places alone
                owner = ["new", trial.target.owner, made.args]
                trial.calls.append(Call(module=trial.target.module, name="__sizeof__", owner=owner))
    subjects = [Subject(source=source, calls=trial.calls) for trial in makers]
    for trial, reply in zip(makers, await worlds.ask(subjects, run=0), strict=True):
        good = [call.owner for call, said in zip(trial.calls, reply.answers, strict=True) if said and "value" in said]
        unique = {str(owner): owner for owner in good}
        inputs.objects.setdefault(trial.target.module, []).extend(list(unique.values())[:30])


def _add_examples(trial: _Trial, surface: Surface) -> None:
    target = trial.target
    for call in surface.examples:
        owner = call.owner[1] if call.owner else None
        if (call.module, owner, call.name) == (target.module, target.owner, target.name):
            trial.calls.append(call)
            trial.kinds.append(None)


def _add_call(trial: _Trial, inputs: Inputs, target: Callable, kinds: Kinds, rng: random.Random) -> None:
    owner = None
    if target.owner:
        made = [tree for tree in inputs.objects.get(target.module, []) if tree[1] == target.owner]
        if not made:
            return
        owner = rng.choice(made)
    trial.calls.append(inputs.call(target, kinds, owner))
    trial.kinds.append(kinds)


async def _ask(worlds: Worlds, source: Source, trials: list[_Trial]) -> None:
    subjects = [Subject(source=source, calls=trial.calls, traced=True) for trial in trials]
    for trial, reply in zip(trials, await worlds.ask(subjects, run=0), strict=True):
        trial.broken = reply.detail
        for call, kinds, said in zip(trial.calls, trial.kinds, reply.answers, strict=True):
            if said is None or "unclear" in said:
                continue
            trial.answered.append((call, said))
            if "value" in said and kinds is not None:
                trial.good.append((kinds, None))


async def _steady(worlds: Worlds, source: Source, trials: list[_Trial]) -> Probed:
    """Choose tests, and drop those that answer otherwise in another order, folder, hash seed or at another time."""
    probed = Probed(source)
    each = min(20, max(6, _KEPT_PER_SOURCE // max(1, sum(bool(trial.good) for trial in trials))))
    chosen = [pair for trial in trials for pair in _choose(trial, each)][:_KEPT_PER_SOURCE]
    calls = [call for call, _ in chosen]
    again: list[Reply] = [(await worlds.ask([Subject(source=source, calls=calls)], run=run))[0] for run in (1, 2)]
    for number, (call, said) in enumerate(chosen):
        expected = canonical(said)
        if any(reply.answers[number] is None or canonical(reply.answers[number] or {}) != expected for reply in again):
            probed.dropped["flaky"] += 1
            continue
        probed.tests.append(Test(call=call, expected={k: said[k] for k in ("value", "after", "raises") if k in said}))
        probed.lines.append(frozenset((path, line) for path, lines in said["lines"].items() for line in lines))
    return probed


def _choose(trial: _Trial, each: int) -> list[tuple[Call, dict[str, Any]]]:
    """Calls of one callable that tell something: new lines first, few equal answers, few exceptions."""
    unique = {call.key(): (call, said) for call, said in reversed(trial.answered) if _tells(said)}
    pending = list(reversed(unique.values()))
    seen: set[tuple[str, int]] = set()
    answers: Counter[str] = Counter()
    raising = 0
    kept: list[tuple[Call, dict[str, Any]]] = []
    by_news: dict[bool, list[tuple[Call, dict[str, Any]]]] = defaultdict(list)
    for call, said in pending:
        lines = {(path, line) for path, numbers in said["lines"].items() for line in numbers}
        by_news[not lines <= seen].append((call, said))
        seen |= lines
    for call, said in by_news[True] + by_news[False]:
        text = canonical(said)
        if len(kept) >= each or answers[text] >= _SAME_ANSWER or ("raises" in said and raising >= _RAISING):
            continue
        answers[text] += 1
        raising += "raises" in said
        kept.append((call, said))
    return kept


def _tells(said: dict[str, Any]) -> bool:
    """Whether an answer says anything: a value, or an exception that a caller might mean."""
    if not said.get("lines"):
        return False
    if "raises" in said:
        return said["raises"] not in _UNMEANT
    return (said["value"] is not None or "after" in said) and "nan" not in tags(said["value"])
