"""The catalogue of code repair: one-line functions, each with a bug that its visible assertion shows.

Results are computed from `solve`, the reference in Python itself, never from the text of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bug:
    """A function `name(params)` that returns `wrong` where it should return `right`.

    `visible` is the one call in the assertion; `hidden` are the calls that decide. Arguments are plain JSON values.
    """

    name: str
    params: str
    wrong: str
    right: str
    solve: Callable[..., Any]
    visible: tuple[Any, ...]
    hidden: tuple[tuple[Any, ...], ...]


TRAIN_BUGS: tuple[Bug, ...] = (
    Bug("add", "a, b", "a - b", "a + b", lambda a, b: a + b, (2, 3), ((0, 0), (7, -4), (10, 25))),
    Bug("subtract", "a, b", "a + b", "a - b", lambda a, b: a - b, (9, 4), ((0, 5), (3, 3), (20, 7))),
    Bug("multiply", "a, b", "a + b", "a * b", lambda a, b: a * b, (3, 4), ((0, 5), (7, 6), (-2, 8))),
    Bug("square", "x", "x + x", "x * x", lambda x: x * x, (3,), ((0,), (5,), (-4,))),
    Bug("cube", "x", "x * x", "x * x * x", lambda x: x**3, (2,), ((0,), (3,), (-3,))),
    Bug("half", "x", "x * 2", "x // 2", lambda x: x // 2, (8,), ((0,), (10,), (26,))),
    Bug("triple", "x", "x * 2", "x * 3", lambda x: x * 3, (5,), ((0,), (7,), (-1,))),
    Bug("increment", "n", "n - 1", "n + 1", lambda n: n + 1, (4,), ((0,), (-1,), (99,))),
    Bug("decrement", "n", "n + 1", "n - 1", lambda n: n - 1, (4,), ((0,), (-1,), (99,))),
    Bug("negate", "x", "x", "-x", lambda x: -x, (5,), ((0,), (-3,), (12,))),
    Bug("is_even", "n", "n % 2 == 1", "n % 2 == 0", lambda n: n % 2 == 0, (4,), ((0,), (7,), (13,))),
    Bug("is_positive", "x", "x < 0", "x > 0", lambda x: x > 0, (3,), ((0,), (-2,), (8,))),
    Bug("is_zero", "x", "x != 0", "x == 0", lambda x: x == 0, (0,), ((1,), (-1,), (5,))),
    Bug("bigger", "a, b", "min(a, b)", "max(a, b)", lambda a, b: max(a, b), (2, 7), ((7, 2), (3, 3), (-1, -5))),
    Bug("first", "items", "items[1]", "items[0]", lambda items: items[0], ([4, 5, 6],), (([9, 1],), (["a", "b"],))),
    Bug("total", "items", "len(items)", "sum(items)", sum, ([1, 2, 3],), (([],), ([10],), ([5, 5],))),
    Bug("largest", "items", "min(items)", "max(items)", max, ([3, 8, 5],), (([1],), ([-4, -9],), ([2, 2],))),
    Bug("ascending", "items", "items", "sorted(items)", sorted, ([3, 1, 2],), (([],), ([2, 1],), ([5, 4, 9],))),
    Bug("upper", "s", "s.lower()", "s.upper()", lambda s: s.upper(), ("ab",), (("Cat",), ("",), ("x1",))),
    Bug("length", "s", "len(s) + 1", "len(s)", len, ("abc",), (("",), ("hello",), ("xy",))),
    Bug("greet", "name", "'Hi ' + 'name'", "'Hi ' + name", lambda name: "Hi " + name, ("Ann",), (("Bo",), ("",))),
    Bug("join", "a, b", "b + a", "a + b", lambda a, b: a + b, ("ab", "cd"), (("x", ""), ("no", "on"))),
    Bug("repeat", "s, n", "s + n", "s * n", lambda s, n: s * n, ("ab", 2), (("x", 3), ("a", 0))),
    Bug("starts_with_a", "s", "s[0] == 'b'", "s[0] == 'a'", lambda s: s[0] == "a", ("ant",), (("bee",), ("cab",))),
    Bug("area", "w, h", "w + h", "w * h", lambda w, h: w * h, (3, 5), ((1, 9), (0, 4), (6, 6))),
    Bug("minutes", "hours", "hours * 24", "hours * 60", lambda hours: hours * 60, (2,), ((0,), (1,), (5,))),
    Bug("average", "a, b", "(a - b) / 2", "(a + b) / 2", lambda a, b: (a + b) / 2, (4, 6), ((1, 2), (0, 0))),
    Bug("remainder", "a, b", "a // b", "a % b", lambda a, b: a % b, (7, 4), ((9, 3), (5, 10), (14, 5))),
    Bug("equal", "a, b", "a != b", "a == b", lambda a, b: a == b, (3, 3), ((3, 4), (0, 0), ("a", "b"))),
    Bug("both", "a, b", "a or b", "a and b", lambda a, b: a and b, (True, False), ((True, True), (False, False))),
    Bug("contains", "items, x", "x not in items", "x in items", lambda i, x: x in i, ([1, 2], 2), (([1], 5), ([], 1))),
    Bug("push", "items, x", "items + x", "items + [x]", lambda i, x: [*i, x], ([1], 2), (([], 3), ([4, 5], 6))),
)

HELDOUT_BUGS: tuple[Bug, ...] = (
    Bug("double", "x", "x + 2", "x * 2", lambda x: x * 2, (5,), ((0,), (7,), (-3,))),
    Bug("plus_ten", "n", "n - 10", "n + 10", lambda n: n + 10, (5,), ((0,), (-10,), (32,))),
    Bug("difference", "x, y", "x + y", "x - y", lambda x, y: x - y, (8, 3), ((1, 1), (0, 6), (50, 20))),
    Bug("product", "x, y", "x - y", "x * y", lambda x, y: x * y, (4, 5), ((0, 3), (-2, 6), (9, 9))),
    Bug("is_odd", "n", "n % 2 == 0", "n % 2 == 1", lambda n: n % 2 == 1, (3,), ((4,), (0,), (9,))),
    Bug("is_negative", "x", "x > 0", "x < 0", lambda x: x < 0, (-3,), ((0,), (2,), (-8,))),
    Bug("smaller", "a, b", "max(a, b)", "min(a, b)", lambda a, b: min(a, b), (2, 7), ((7, 2), (3, 3), (-1, -5))),
    Bug("smallest", "items", "max(items)", "min(items)", min, ([3, 8, 5],), (([1],), ([-4, -9],), ([2, 0],))),
    Bug("lower", "s", "s.upper()", "s.lower()", lambda s: s.lower(), ("AB",), (("Cat",), ("",), ("X1",))),
    Bug("second", "items", "items[0]", "items[1]", lambda items: items[1], ([4, 5, 6],), (([9, 1],), ([7, 8, 3],))),
    Bug("count", "items", "sum(items)", "len(items)", len, ([1, 2, 3],), (([],), ([10],), ([5, 5],))),
    Bug("seconds", "minutes", "minutes * 24", "minutes * 60", lambda m: m * 60, (3,), ((0,), (1,), (10,))),
    Bug("perimeter", "side", "side * 3", "side * 4", lambda side: side * 4, (3,), ((0,), (1,), (10,))),
    Bug("either", "a, b", "a and b", "a or b", lambda a, b: a or b, (True, False), ((False, False), (True, True))),
    Bug("different", "a, b", "a == b", "a != b", lambda a, b: a != b, (3, 4), ((3, 3), (0, 1))),
    Bug("twice", "s", "s", "s + s", lambda s: s + s, ("ab",), (("x",), ("",), ("cde",))),
)
