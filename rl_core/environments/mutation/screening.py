"""Mutants of a source that its tests notice: which edits are tried, in which order, and why the others are dropped."""

from __future__ import annotations

import random
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass

from rl_core.environments.mutation.calls import canonical
from rl_core.environments.mutation.operators import Edit, Text, edits_of
from rl_core.environments.mutation.probe import Probed
from rl_core.environments.mutation.worlds import Reply, Subject, Worlds

MIN_FAILING = 3  # one to show, two to hide
_MOST_TESTS = 40  # run on one mutant


@dataclass(frozen=True)
class Mutant:
    """An edit of a file, and the tests that it fails and passes, by their numbers in the probed source."""

    probed: Probed
    path: str
    edit: Edit
    failing: tuple[int, ...]
    passing: tuple[int, ...]

    @property
    def text(self) -> str:
        """The file with the edit."""
        return self.edit.apply(self.probed.source.files[self.path])


class Screen:
    """Tries the edits of one source, a few at a time. `dropped` counts why edits were given up."""

    def __init__(self, probed: Probed, seed: int) -> None:
        self.probed = probed
        self.dropped: Counter[str] = Counter()
        self.tried = 0
        self._covering: dict[tuple[str, int], list[int]] = defaultdict(list)
        for number, lines in enumerate(probed.lines):
            for place in lines:
                self._covering[place].append(number)
        self._pending = self._order(random.Random(f"{seed}:edits:{probed.source.name}"))
        self._behaviours: set[str] = set()

    async def more(self, worlds: Worlds, count: int) -> list[Mutant]:
        """The mutants among the next edits that tests notice; none when there are no more. Raises: WorldError."""
        batch, self._pending = self._pending[:count], self._pending[count:]
        self.tried += len(batch)
        fresh = [(path, edit) for path, edit in batch if self._changes_code(path, edit)]
        source = self.probed.source
        subjects = []
        for path, edit in fresh:
            calls = [self.probed.tests[number].call for number in self._tests_of(path, edit)]
            subjects.append(Subject(source=source, calls=calls, files={path: edit.apply(source.files[path])}))
        replies = await worlds.ask(subjects, run=0)
        mutants = (self._judge(path, edit, reply) for (path, edit), reply in zip(fresh, replies, strict=True))
        return [mutant for mutant in mutants if mutant]

    def _order(self, rng: random.Random) -> list[tuple[str, Edit]]:
        """One edit a line that enough tests run, in seeded order, the kinds taking turns."""
        by_kind: dict[str, list[tuple[str, Edit]]] = defaultdict(list)
        for path in sorted({path for path, _ in self._covering}):
            for edit in edits_of(Text(self.probed.source.files[path])):
                if len(self._covering.get((path, edit.line), ())) >= MIN_FAILING:
                    by_kind[edit.kind.value].append((path, edit))
        for edits in by_kind.values():
            rng.shuffle(edits)
        ordered: list[tuple[str, Edit]] = []
        taken: set[tuple[str, int]] = set()
        while any(by_kind.values()):
            for kind in sorted(by_kind):
                if by_kind[kind]:
                    path, edit = by_kind[kind].pop()
                    if (path, edit.line) not in taken:
                        taken.add((path, edit.line))
                        ordered.append((path, edit))
        return ordered

    def _tests_of(self, path: str, edit: Edit) -> list[int]:
        return self._covering[path, edit.line][:_MOST_TESTS]

    def _changes_code(self, path: str, edit: Edit) -> bool:
        """Whether the edit compiles to other code. Nothing is run."""
        before = self.probed.source.files[path]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                same = compile(before, path, "exec", optimize=0) == compile(
                    edit.apply(before), path, "exec", optimize=0
                )
            except SyntaxError:
                self.dropped["does not compile"] += 1
                return False
        self.dropped["equivalent"] += same
        return not same

    def _judge(self, path: str, edit: Edit, reply: Reply) -> Mutant | None:
        reason = {"broken": "does not import", "hangs": "hangs", "dies": "crashes"}.get(reply.end, "")
        numbers = self._tests_of(path, edit)
        given = [canonical(answer or {}) for answer in reply.answers]
        failing = [n for n, text in zip(numbers, given, strict=True) if text != self._expected(n)]
        behaviour = f"{path}:{sorted(zip(numbers, given, strict=True))}"
        if not reason and not failing:
            reason = "equivalent"  # as far as any test can tell
        elif not reason and len(failing) < MIN_FAILING:
            reason = "too few failing tests"
        elif not reason and behaviour in self._behaviours:
            reason = "duplicate"
        self._behaviours.add(behaviour)
        if reason:
            self.dropped[reason] += 1
            return None
        passing = [n for n in numbers if n not in failing]
        return Mutant(self.probed, path, edit, tuple(failing), tuple(passing))

    def _expected(self, number: int) -> str:
        return canonical(self.probed.tests[number].expected)
