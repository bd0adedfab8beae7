"""The file tools: what they show, what they change, and what they tell a policy that asks for the impossible."""

import time

import pytest

from rl_core.environments.repository import file_tools
from rl_core.environments.repository.tools import FILE_TOOLS, REPOSITORY_TOOLS
from rl_core.environments.repository.tree import ToolProblem, Tree
from rl_core.environments.tool_syntax import BadCall, check_arguments

BASE = {
    "a.py": b"def f():\n    return 1\n\ndef g():\n    return 1\n",
    "lib/b.py": b"import a\nassert a.f() == 1\n",
    "lib/deep/er/c.txt": b"see f\n",
    "lib/data.bin": b"\xff\x00f",
    "empty": b"",
}
TREE = Tree(BASE, {})


def call(name, tree=TREE, **arguments):
    checked = check_arguments(REPOSITORY_TOOLS, name, arguments, written="")
    assert not isinstance(checked, BadCall), checked.problem
    return FILE_TOOLS[name](tree, arguments)


def test_read_numbers_the_lines_and_says_what_it_left_out():
    assert call("read", path="lib/b.py")[0] == "1\timport a\n2\tassert a.f() == 1"
    assert call("read", path="a.py", first_line=2, last_line=3)[0] == "2\t    return 1\n3\t\n(2 more lines of 5)"
    assert call("read", path="a.py", first_line=5, last_line=99)[0] == "5\t    return 1"
    assert call("read", path="empty")[0] == "(empty is empty)"


def test_read_is_bounded_in_lines_and_in_their_length():
    big = Tree({"big": b"x" * 5000 + b"\n" + b"y\n" * 9000}, {})
    text, _ = call("read", big, path="big")
    assert text.endswith("(8601 more lines of 9001)")
    assert "(4600 more characters)" in text.split("\n")[0]
    assert len(text) < 5000


def test_list_opens_folders_to_a_depth():
    assert call("list")[0].split("\n") == ["a.py", "empty", "lib/b.py", "lib/data.bin", "lib/deep/ (1 files)"]
    assert call("list", depth=1)[0].split("\n") == ["a.py", "empty", "lib/ (3 files)"]
    assert call("list", path="lib/deep", depth=8)[0] == "er/c.txt"
    many = Tree({f"f{n:04}": b"" for n in range(1000)}, {})
    assert call("list", many)[0].endswith("(700 more entries)")


def test_grep_finds_lines_of_text_files_under_a_path():
    assert call("grep", pattern=r"\bf\b")[0].split("\n") == [
        "a.py:1: def f():",
        "lib/b.py:2: assert a.f() == 1",
        "lib/deep/er/c.txt:1: see f",
    ]
    assert call("grep", pattern="F", path="lib/deep", ignore_case=True)[0] == "lib/deep/er/c.txt:1: see f"
    assert call("grep", pattern="import", path="lib/b.py")[0] == "lib/b.py:1: import a"
    assert call("grep", pattern="import", path="li")[0] == "(no matches)"


def test_grep_is_bounded_in_matches_and_in_time():
    many = Tree({"many": b"x\n" * 5000}, {})
    assert call("grep", many, pattern="x")[0].endswith("many:100: x\n(stopped at 100 matches)")
    began = time.monotonic()
    assert call("grep", Tree({"long": b"x" * 200_000}, {}), pattern="(x+x+)+y")[0] == "(no matches)"
    assert time.monotonic() - began < file_tools.GREP_S


@pytest.mark.parametrize(
    "pattern",
    ["((((a{100}){100}){100}){100}){100}", "(" * 200, "x{9999}", r"\p{L}{1000}", "(?=x)", "x" * 400, "[", "\ud800"],
)
def test_patterns_that_are_none_or_would_take_too_much_are_refused(pattern):
    with pytest.raises(ToolProblem, match="pattern"):
        call("grep", pattern=pattern)


def test_grep_gives_up_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(file_tools, "GREP_S", 0.0)
    with pytest.raises(ToolProblem, match="longer than"):
        call("grep", pattern="x")


def test_write_makes_and_replaces():
    text, made = call("write", path="new/x.py", content="é\n")
    assert (text, made.layer) == ("made new/x.py, 3 bytes", {"new/x.py": "é\n".encode()})
    text, replaced = call("write", made, path="./a.py", content="")
    assert (text, replaced.layer["a.py"]) == ("replaced a.py, 0 bytes", b"")


def test_edit_replaces_what_is_there_exactly_once():
    text, edited = call("edit", path="a.py", old="g():\n    return 1", new="g():\n    return 2")
    assert text == "edited a.py at line 4"
    assert edited.read("a.py") == BASE["a.py"].replace(b"g():\n    return 1", b"g():\n    return 2")
    assert edited.layer.keys() == {"a.py"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "a.py", "old": "return 1", "new": "x"}, "more than once"),
        ({"path": "a.py", "old": "return 3", "new": "x"}, "not in a.py"),
        ({"path": "a.py", "old": "", "new": "x"}, "old is empty"),
        ({"path": "none", "old": "x", "new": "y"}, "no file none"),
        ({"path": "../a.py", "old": "x", "new": "y"}, "no path here"),
        ({"path": "a.py", "old": "def f", "new": "\ud800"}, "surrogate"),
    ],
)
def test_edits_that_cannot_be_made_are_refused(arguments, message):
    with pytest.raises(ToolProblem, match=message):
        call("edit", **arguments)


def test_overlapping_occurrences_are_more_than_one():
    with pytest.raises(ToolProblem, match="more than once"):
        call("edit", Tree({"o": b"aaa"}, {}), path="o", old="aa", new="b")


@pytest.mark.parametrize("name", ["read", "list", "grep"])
def test_tools_that_read_change_nothing(name):
    arguments = {"read": {"path": "a.py"}, "list": {}, "grep": {"pattern": "f"}}[name]
    assert call(name, **arguments)[1] is TREE
    assert next(tool for tool in REPOSITORY_TOOLS if tool.name == name).read_only


def test_no_tool_that_writes_says_that_it_only_reads():
    assert {tool.name for tool in REPOSITORY_TOOLS if tool.read_only} == {"read", "list", "grep"}
