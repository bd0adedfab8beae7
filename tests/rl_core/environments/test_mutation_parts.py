"""The parts of the maker of repair tasks that run nothing: sources, operators, calls, inputs, splits."""

import ast
import json
import random
from email.message import Message

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.mutation import __main__ as command
from rl_core.environments.mutation.calls import Call, classes_of, show, tree_of
from rl_core.environments.mutation.inputs import Inputs
from rl_core.environments.mutation.operators import Kind, Text, edits_of
from rl_core.environments.mutation.sources import Source, find_sources, permissive_licence
from rl_core.environments.mutation.splits import function_prints, split_sources
from rl_core.environments.mutation.surface import read_surface
from rl_core.environments.mutation.values import NotPlain, decode, encode
from rl_core.types import Split

EVERY_KIND = '''
def every(a, b, items, é="ü"):
    """Documentation: a < b."""
    total = 0  # a < b
    if a < b and not items:
        total += max(a, b) * 2
    for item in items[1:]:
        if item.startswith("é"):
            break
    if a == 1:
        raise ValueError("a < b")
    return divmod(total, b), True
'''


def a_source(name, text, **more):
    return Source(name, "here", "MIT", {f"{name}.py": text}, {name: f"{name}.py"}, **more)


def about(**fields):
    message = Message()
    for name, value in fields.items():
        for line in value if isinstance(value, list) else [value]:
            message[name.replace("_", "-")] = line
    return message


def test_every_kind_of_mutation_is_found_and_can_be_taken_back():
    edits = edits_of(Text(EVERY_KIND))
    assert {edit.kind for edit in edits} == set(Kind)
    for edit in edits:
        broken = edit.apply(EVERY_KIND)
        assert broken != EVERY_KIND
        assert edit.reverse().apply(broken) == EVERY_KIND
        with pytest.raises(ValueError, match="is not"):
            edit.apply("#" + EVERY_KIND)


def test_mutations_are_where_the_tree_says_and_leave_words_alone():
    edits = edits_of(Text(EVERY_KIND))
    outcomes = {edit.apply(EVERY_KIND) for edit in edits}
    for old, new in {
        "if a < b and": "if a <= b and",
        "b and not": "b or not",
        "max(a, b)": "max(b, a)",
        "items[1:]": "items[:]",
        "(total, b), True": "(total, b), False",
    }.items():
        assert EVERY_KIND.replace(old, new, 1) in outcomes
    for outcome in outcomes:
        assert 'ValueError("a < b")' in outcome or "raise" not in outcome
        assert '"""Documentation: a < b."""' in outcome
        assert "# a < b" in outcome or "total = 0" not in outcome


@pytest.mark.parametrize(
    ("fields", "permissive"),
    [
        ({"License_Expression": "MIT"}, True),
        ({"License_Expression": "Apache-2.0 OR BSD-2-Clause"}, True),
        ({"Classifier": ["License :: OSI Approved :: BSD License", "Topic :: Software"]}, True),
        ({"License": "MIT", "Classifier": "License :: OSI Approved :: MIT License"}, True),
        ({"License_Expression": "MPL-2.0 AND MIT"}, False),
        ({"License_Expression": "LGPL-3.0-only"}, False),
        ({"License": "MIT", "Classifier": "License :: OSI Approved :: GNU General Public License (GPL)"}, False),
        ({"License": "Long\ntext with MIT in it"}, False),
        ({}, False),
    ],
)
def test_only_declared_permissive_licences_count(fields, permissive):
    assert bool(permissive_licence(about(**fields))) is permissive


def test_sources_are_the_standard_library_and_small_packages_with_their_licence():
    sources = {source.name: source for source in find_sources()}
    assert {"textwrap", "heapq", "json"} <= set(sources)
    assert any(not source.origin.startswith("Python ") for source in sources.values())
    assert not {"slipway", "certifi", "psycopg"} & set(sources)
    assert all("LICENSE" in source.files for source in sources.values())
    assert "_heapq" in sources["heapq"].blocked
    with pytest.raises(ValueError, match="no such source: nothing"):
        find_sources(["nothing"])


TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"))
LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS | st.binary() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXTS, inner),
    max_leaves=8,
)


@given(LITERALS)
def test_a_literal_survives_as_a_tree_and_as_text(value):
    tree = tree_of(value)
    assert tree == encode(value)
    for again in (decode(tree, None), ast.literal_eval(show(tree))):
        assert (again, type(again)) == (value, type(value))
        assert encode(again) == tree
    assert "\\u0000" not in json.dumps(tree)


def test_a_text_with_nul_is_no_value_of_a_task_since_no_database_keeps_it():
    assert decode(encode(b"a\0"), None) == b"a\0"
    for value in ("a\0", ["\0"], {"\0": 1}):
        with pytest.raises(NotPlain):
            encode(value)
        with pytest.raises(TypeError):
            tree_of(value)


def test_trees_are_strict_in_type_and_refuse_what_has_no_value():
    class Loud(int):
        pass

    assert encode(True) is True
    assert encode(1.0) == ["float", "1.0"]
    assert encode({2, 1}) == ["set", [1, 2]]
    assert encode(iter([1])) == ["iterator", [1]]
    assert encode(Loud(1)) == ["shown", "Loud", "1"]
    for value in (object(), len, ast, [[object()]]):
        with pytest.raises(NotPlain):
            encode(value)


def test_a_call_says_what_it_needs():
    fraction = ["new", "Fraction", [1, 2]]
    call = Call(module="fractions", name="__add__", args=[["list", [["new", "Other", []]]]], owner=fraction)
    assert call.text() == "Fraction(1, 2).__add__([Other()])"
    assert call.names() == ["Fraction", "Other"]
    assert classes_of(["dict", [["a", fraction]]]) == {"Fraction"}


def test_the_surface_has_what_is_public_and_the_examples():
    source = a_source(
        "shop",
        'def price(n, *, tax=0.1):\n    """Cost.\n\n    >>> price(3, tax=0.5)\n    4.5\n    """\n    return n + tax\n'
        "def _hidden(): pass\n"
        "class Cart:\n    def __init__(self, owner): self.owner = owner\n"
        "    def total(self): return 7\n    def main(self): 0",
    )
    surface = read_surface(source)
    assert [target.label for target in surface.callables] == ["shop.price", "shop.Cart.__init__", "shop.Cart.total"]
    assert [call.text() for call in surface.examples] == ["price(3, tax=0.5)"]
    assert 7 in surface.numbers


def test_equal_seeds_give_equal_inputs():
    surface = read_surface(find_sources(["textwrap"])[0])

    def draw(seed):
        inputs = Inputs(surface, random.Random(seed))
        return [inputs.call(target, inputs.kinds_for(target), None).key() for target in surface.callables * 5]

    assert draw(1) == draw(1) != draw(2)


def test_sources_that_share_code_are_never_on_two_sides():
    shared = "def f(a):\n    " + "\n    ".join(f"a = a * {n} + a" for n in range(12)) + "\n    return a\n"
    vendored = a_source("vendored", "import os\n" + shared.replace("def f(a):", 'def g(a):\n    """Copied."""'))
    sources = [a_source(f"s{n}", f"x = {n}\n") for n in range(12)] + [vendored, a_source("origin", shared)]
    for seed in range(20):
        splits = split_sources(sources, seed)
        assert splits["vendored"] is splits["origin"]
        assert set(splits.values()) == {Split.TRAIN, Split.HELDOUT}


def test_no_function_of_this_installation_is_on_two_sides():
    sources = find_sources()
    splits = split_sources(sources, 0)
    sides = {split: set() for split in Split}
    for source in sources:
        sides[splits[source.name]] |= function_prints(source)
    assert all(sides.values())
    assert not set.intersection(*sides.values())


def test_without_a_sandbox_nothing_is_made_and_the_message_says_what_to_start(tmp_path, capsys):
    out = tmp_path / "tasks.jsonl"
    code = command.main(["--out", str(out), "--socket", str(tmp_path / "no.sock"), "--sources", "textwrap"])
    assert code == command.REFUSED
    assert "start it with `python -m rl_core.sandbox" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("wrong", [["--count", "0"], ["--count", "x"], []])
def test_wrong_arguments_are_refused(wrong, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        command.main([*wrong, *(["--out", str(tmp_path / "x")] if wrong else [])])
    assert stopped.value.code == command.WRONG


def test_an_unknown_source_is_refused(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "x"), "--sources", "nothing"]) == command.WRONG
    assert "no such source: nothing" in capsys.readouterr().err
