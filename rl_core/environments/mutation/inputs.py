"""Seeded calls. Which kinds of values a function takes is found by trying: from its names, then from what worked."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rl_core.environments.mutation.calls import Call, Tree
from rl_core.environments.mutation.surface import Callable, Parameter, Surface

_WORDS = (  # noqa: SIM905
    "a b ab abc Abc hello world the quick brown fox jumps over lazy dog 42 -1 3.5 x=1 key:value a,b a.b a/b/c "
    "*.txt foo.txt [a-c]* 'quoted' \"double\" #hash $name ${name} %s {} <b>&amp; café naïve ß é 日本 user@example.com "
    "http://example.com/p?q=1#f 127.0.0.1 10.0.0.0/8 ::1 2024-02-29 12:30 true None CamelCase snake_case kebab-case"
).split()
_HINTS = {
    "text": "text s string str line word name key prefix suffix title value data value content fragment token url sep",
    "strings": "lines words names strings fields parts sequence seq a b",
    "int": "n k i j num number count width year month day maxlen size start stop end lo hi index indent level base pos",
    "float": "x y z r g h l v mu sigma p alpha",
    "ints": "data items values iterable it heap iterables numbers xs seq sequence a",
    "bytes": "data b buf payload",
    "dict": "mapping d graph dct env environ kwargs params",
    "path": "path filename pathname file pat pattern glob",
}
_KINDS = (
    "int",
    "float",
    "text",
    "word",
    "ints",
    "floats",
    "strings",
    "pairs",
    "dict",
    "bytes",
    "bool",
    "none",
    "tuple",
    "own",
)
_ANNOTATED = {
    "str": "text", "int": "int", "float": "float", "bool": "bool", "bytes": "bytes", "list[int]": "ints",
    "list[str]": "strings", "Sequence[str]": "strings", "Iterable[str]": "strings", "dict[str, str]": "dict",
}  # fmt: skip

Kinds = tuple[tuple[str, str], ...]  # what each argument is filled with: its place or name, and a kind


class Inputs:
    """Makes calls of one source. Everything comes from `rng`, so equal seeds give equal calls."""

    def __init__(self, surface: Surface, rng: random.Random) -> None:
        self._rng = rng
        self._strings = surface.strings or ["x"]
        self._numbers = surface.numbers or [0]
        self.objects: dict[str, list[Tree]] = {}  # by module: objects of its classes that could be made

    def kinds_for(self, target: Callable) -> Kinds:
        """A guess: each required parameter, and some of the others; a constructor's are given by place."""
        if target.name == "__init__":
            required = sum(parameter.default is None for parameter in target.parameters)
            given = target.parameters[: self._rng.randint(required, max(required, len(target.parameters)))]
            return tuple((str(place), self._kind_of(parameter)) for place, parameter in enumerate(given))
        chosen = []
        for place, parameter in enumerate(target.parameters):
            if parameter.default is None or self._rng.random() < 0.35:
                named = parameter.keyword_only or parameter.default is not None
                chosen.append((parameter.name if named else str(place), self._kind_of(parameter)))
        if target.variadic and not any(not key.isdigit() for key, _ in chosen):
            kind = self._rng.choice(_KINDS)
            chosen += [(str(len(chosen)), kind) for _ in range(self._rng.randrange(3))]
        return tuple(chosen)

    def call(self, target: Callable, kinds: Kinds, owner: Tree) -> Call:
        """A call with new values of these kinds."""
        args = [self.value(kind, target.module) for key, kind in kinds if key.isdigit()]
        kwargs = {key: self.value(kind, target.module) for key, kind in kinds if not key.isdigit()}
        return Call(module=target.module, name=target.name, args=args, kwargs=kwargs, owner=owner)

    def _kind_of(self, parameter: Parameter) -> str:
        rng = self._rng
        annotated = _ANNOTATED.get(parameter.annotation.removesuffix(" | None"))
        if annotated and rng.random() < 0.85:
            return annotated
        if parameter.default in ("True", "False") and rng.random() < 0.9:
            return "bool"
        if parameter.default is not None and parameter.default.lstrip("-").isdigit() and rng.random() < 0.7:
            return "int"
        hinted = [kind for kind, names in _HINTS.items() if parameter.name.lower() in names.split()]
        if hinted and rng.random() < 0.7:
            return rng.choice(hinted)
        return rng.choice(_KINDS)

    def value(self, kind: str, module: str) -> Tree:
        """A value of a kind."""
        rng = self._rng
        if kind == "own":
            made = self.objects.get(module)
            return rng.choice(made) if made else self.text()
        if kind == "bool":
            return rng.random() < 0.5
        makers = {
            "int": self.integer,
            "float": self.real,
            "text": self.text,
            "word": lambda: rng.choice(_WORDS),
            "path": lambda: rng.choice(("a.txt", "dir/b.py", "*.p?", "[!a]*", "/x/y.tar.gz", "C:\\x\\y", "no")),
            "none": lambda: None,
            "bytes": lambda: [
                "bytes",
                bytes(rng.choice((65, 97, 61, 10, 48, 255, 0, 32)) for _ in range(rng.randrange(9))).hex(),
            ],
            "ints": lambda: self.many(self.integer),
            "floats": lambda: self.many(self.real),
            "strings": lambda: self.many(self.text),
            "pairs": lambda: self.many(lambda: ["tuple", [self.text(), self.integer()]]),
            "tuple": lambda: ["tuple", self.many(self.integer)[1]],
            "dict": self.mapping,
        }
        return makers[kind]()

    def integer(self) -> int:
        """Mostly small, sometimes one of the source's own."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.15:
            return rng.choice(self._numbers)
        return rng.randint(-3, 12) if draw < 0.75 else rng.choice((16, 20, 64, 100, 255, 1000, 2000, 2024, -50))

    def real(self) -> Tree:
        """A float of few digits."""
        rng = self._rng
        return ["float", repr(rng.choice((0.0, 0.25, 0.5, 1.0, -1.5, 2.75, 10.0, round(rng.uniform(-5, 5), 2))))]

    def text(self) -> str:
        """Words, the source's own strings, and the spaces and marks between them that code trips over."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.05:
            return ""
        if draw < 0.3:
            return rng.choice(self._strings)
        pieces: Sequence[str] = [
            rng.choice(_WORDS if rng.random() < 0.75 else self._strings) for _ in range(rng.choice((1, 1, 2, 3, 5, 9)))
        ]
        return rng.choice((" ", " ", " ", "", "  ", "\n", "\n    ", "\t", ",", "=", "-", "; ", "/", ".")).join(pieces)

    def many(self, make: object) -> Tree:
        """A list, often sorted, with repeats."""
        items = [make() for _ in range(self._rng.choice((0, 1, 2, 3, 4, 6, 9)))]  # type: ignore[operator]
        if self._rng.random() < 0.3 and all(type(item) is int for item in items):
            items.sort()
        return ["list", items]

    def mapping(self) -> Tree:
        """A dictionary of strings to strings, numbers or lists of its own keys."""
        rng = self._rng
        keys = sorted({rng.choice(_WORDS) for _ in range(rng.randrange(5))})
        form = rng.randrange(3)
        values = [self.text() if form == 0 else self.integer() if form == 1 else self._some(keys) for _ in keys]
        return ["dict", [[key, value] for key, value in zip(keys, values, strict=True)]]

    def _some(self, keys: list[str]) -> Tree:
        return ["list", [key for key in keys if self._rng.random() < 0.3]]
