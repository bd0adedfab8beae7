"""A repository as a value: paths that stay inside, layers that hold only what differs, diffs that are bounded."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.repository.changes import MAX_DIFF_CHARS, unified_diff
from rl_core.environments.repository.tree import (
    MAX_FILE_BYTES,
    MAX_LAYER_BYTES,
    MAX_LAYER_FILES,
    ToolProblem,
    Tree,
    ended_lines,
    plain,
)

BASE = {"a.py": b"one\ntwo\n", "lib/b.py": b"three\n", "lib/data.bin": b"\xff\x00"}


def tree(**layer):
    return Tree(BASE, layer)


@pytest.mark.parametrize(
    ("path", "name"), [("a.py", "a.py"), ("./lib//b.py", "lib/b.py"), ("lib/", "lib"), ("a b/é.py", "a b/é.py")]
)
def test_a_path_is_named_as_the_tree_names_it(path, name):
    assert plain(path) == name


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../a", "lib/../../a", "lib/..", "a\0b", "a\nb", "", ".", "x" * 300, "a\u202eb", "\ud800"]
)
def test_paths_that_leave_the_tree_or_are_odd_are_refused(path):
    with pytest.raises(ToolProblem):
        plain(path)


def test_the_root_is_a_folder_only():
    assert plain(".", folder=True) == plain("", folder=True) == ""
    with pytest.raises(ToolProblem):
        plain("..", folder=True)


def test_the_layer_holds_what_differs_and_nothing_else():
    changed = tree().written("a.py", b"x").written("new/c.py", b"y").deleted("lib/b.py")
    assert changed.layer == {"a.py": b"x", "new/c.py": b"y", "lib/b.py": None}
    assert list(changed.paths()) == ["a.py", "lib/data.bin", "new/c.py"]
    assert changed.folders == {"", "lib", "new"}
    back = changed.written("a.py", BASE["a.py"]).deleted("new/c.py").written("lib/b.py", BASE["lib/b.py"])
    assert back.layer == {}
    assert tree().layer == {}


def test_deleted_files_are_gone():
    gone = tree().deleted("a.py")
    assert not gone.exists("a.py")
    for act in (gone.read, gone.text, gone.deleted):
        with pytest.raises(ToolProblem, match=r"no file a\.py"):
            act("a.py")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: tree().read("lib"), "folder"),
        (lambda: tree().written("lib", b""), "folder"),
        (lambda: tree().written("a.py/x", b""), "a.py is a file"),
        (lambda: tree().written("a.py/x/y", b""), "a.py is a file"),
        (lambda: tree().text("lib/data.bin"), "not a text"),
        (lambda: tree(z=b"a\0b").text("z"), "not a text"),
        (lambda: tree().written("z", b"x" * (MAX_FILE_BYTES + 1)), "bytes"),
        (lambda: Tree({}, {f"f{n}": b"" for n in range(MAX_LAYER_FILES)}).written("z", b""), "files changed"),
        (lambda: Tree({}, {"f": b"x" * MAX_LAYER_BYTES}).written("z", b"x"), "together"),
    ],
)
def test_what_cannot_be_is_said(act, message):
    with pytest.raises(ToolProblem, match=message):
        act()


@given(st.text(alphabet="ab\n\r\x0c\u2028", max_size=30))
def test_lines_are_split_at_line_feeds_alone_and_lose_nothing(text):
    lines = ended_lines(text)
    assert "".join(lines) == text
    assert all(line.endswith("\n") for line in lines[:-1])
    assert all(line.count("\n") <= 1 and line for line in lines)


def test_the_diff_is_one_that_git_applies(tmp_path):
    base = BASE | {"bare": b"no end", "form-feed.txt": b"a\x0cb\nc\n"}
    layer = {
        "a.py": b"one\n2\n",
        "bare": b"no end\nmore",
        "form-feed.txt": b"a\x0cB\nc\n",
        "new.py": b"n",
        "lib/b.py": None,
    }
    for name, content in base.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    patch = unified_diff(Tree(base, layer))
    subprocess.run(["git", "apply", "--unsafe-paths", "-p1"], cwd=tmp_path, input=patch.encode(), check=True)
    after = {name: (tmp_path / name).read_bytes() for name in base | layer if (tmp_path / name).exists()}
    assert after == {name: content for name, content in (base | layer).items() if content is not None}


def test_the_diff_is_bounded():
    long = {"long": b"x\n" * 100_000, "odd": b"\xff", **{f"f{n}": b"y\n" * 1900 for n in range(40)}}
    diff = unified_diff(Tree({"long": b"a\n"}, long))
    assert len(diff) < MAX_DIFF_CHARS + 100
    assert "(cut)" in diff
    few = unified_diff(Tree({"long": b"a\n"}, {"long": long["long"], "odd": b"\xff"}))
    assert "(long: 1 → 100000 lines)" in few
    assert "(not text: 0 → 1 bytes)" in few
