"""Unified diffs as models write them: exact in text, lenient in numbers, whole or not at all."""

import difflib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.repository.tree import ToolProblem, Tree, ended_lines
from rl_core.environments.repository.unified_patch import apply_patch

LINES = [f"line {number}\n" for number in range(1, 31)]
BASE = {"a.txt": "".join(LINES).encode(), "b.txt": b"x\n", "bare": b"one\ntwo", "twice": b"s\nt\n" * 4}


def patched(patch, base=BASE):
    tree, changed = apply_patch(Tree(base, {}), patch)
    return {name: content.decode() if content is not None else None for name, content in tree.layer.items()}, changed


def hunk(header="@@ -10,3 +10,3 @@", old=10):
    return f"{header}\n line {old}\n-line {old + 1}\n+new\n line {old + 2}\n"


def test_a_hunk_applies_where_it_says():
    layer, changed = patched("--- a/a.txt\n+++ b/a.txt\n" + hunk())
    assert layer["a.txt"].split("\n")[9:12] == ["line 10", "new", "line 12"]
    assert changed == ["a.txt"]


@pytest.mark.parametrize("header", ["@@ -3,3 +3,3 @@", "@@ -99 +99 @@ def f():", "@@ -10,9 +10,1 @@"])
def test_numbers_in_headers_are_hints(header):
    assert patched("--- a.txt\n+++ a.txt\n" + hunk(header))[0] == patched("--- a.txt\n+++ a.txt\n" + hunk())[0]


def test_several_hunks_shift_one_another():
    patch = "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,4 @@\n line 1\n+a\n+b\n line 2\n" + hunk("@@ -20,3 +22,3 @@", 20)
    layer, _ = patched(patch)
    assert layer["a.txt"].startswith("line 1\na\nb\nline 2\n")
    assert "line 20\nnew\nline 22\n" in layer["a.txt"]


def test_the_header_tells_places_that_look_alike_apart():
    patch = "--- a/twice\n+++ b/twice\n@@ -1,2 +1,4 @@\n s\n+a\n+b\n t\n@@ -5,2 +7,2 @@\n s\n-t\n+u\n"
    assert patched(patch)[0] == {"twice": "s\na\nb\nt\ns\nt\ns\nu\ns\nt\n"}


def test_many_equal_lines_take_no_time():
    """They took minutes, in which no other session went on."""
    alike = {"a": b"\n" * 300_000}
    began_s = time.thread_time()
    with pytest.raises(ToolProblem, match="nowhere"):
        patched("--- a/a\n+++ b/a\n@@ -1,500 +1 @@\n" + " \n" * 500 + "-x\n", alike)
    with pytest.raises(ToolProblem, match="more than 9 places, none of them line 400000"):
        patched("--- a/a\n+++ b/a\n@@ -400000,2 +1 @@\n \n-\n", alike)
    assert time.thread_time() - began_s < 3


def test_files_are_made_and_deleted():
    patch = (
        "diff --git a/new/c.txt b/new/c.txt\nnew file mode 100644\nindex 0..1\n"
        "--- /dev/null\n+++ b/new/c.txt\n@@ -0,0 +1,2 @@\n+one\n+two\n"
        "--- a/b.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    )
    assert patched(patch) == ({"new/c.txt": "one\ntwo\n", "b.txt": None}, ["new/c.txt", "b.txt"])


def test_a_file_without_a_line_feed_at_its_end_keeps_it_so():
    assert patched("--- a/bare\n+++ b/bare\n@@ -1,2 +1,2 @@\n-one\n+1\n two\n")[0] == {"bare": "1\ntwo"}
    marker = "\\ No newline at end of file\n"
    told = f"--- a/bare\n+++ b/bare\n@@ -1,2 +1,2 @@\n one\n-two\n{marker}+2\n{marker}"
    assert patched(told)[0] == {"bare": "one\n2"}
    assert patched("--- a/bare\n+++ b/bare\n@@ -2 +2 @@\n-two\n+2\n")[0] == {"bare": "one\n2\n"}


def test_an_empty_line_is_context_whose_space_was_lost():
    base = {"f": b"a\n\nb\n"}
    assert patched("--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n", base)[0] == {"f": "a\n\nc\n"}


def test_removed_lines_may_look_like_headers():
    base = {"f": b"-- x\n+ y\nz\n"}
    assert patched("--- a/f\n+++ b/f\n@@ -1,3 +1,2 @@\n--- x\n + y\n-z\n+++ w\n", base)[0] == {"f": "+ y\n++ w\n"}


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("", "no hunks"),
        ("--- a/a.txt\n+++ b/a.txt\n", "no hunks"),
        (hunk(), "names no file"),
        ("--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n line 1\n-line 9\n+x\n", "nowhere"),
        ("--- a/twice\n+++ b/twice\n@@ -99,2 +99,2 @@\n s\n-t\n+u\n", "in 4 places"),
        ("--- a/none\n+++ b/none\n" + hunk(), "no file none"),
        ("--- /dev/null\n+++ b/b.txt\n@@ -0,0 +1 @@\n+y\n", "there already"),
        ("--- a/a.txt\n+++ b/b.txt\n" + hunk(), "renames"),
        ("--- a/b.txt\n+++ /dev/null\n@@ -1 +1 @@\n-x\n+y\n", "leaves 2 characters"),
        ("--- a/../../etc/passwd\n+++ b/../../etc/passwd\n" + hunk(), "no path here"),
        ("--- /etc/passwd\n+++ /etc/passwd\n" + hunk(), "no path here"),
        ("--- a/a.txt\n+++ b/a.txt\n@@ -5,0 +6 @@\n+x\n", "no line of context"),
        ("diff --git a/a b/c\nrename from a\nrename to c\n", "cannot do"),
        ("--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-x\n", "must name a file"),
        ("--- a/a.txt\n+++ b/a.txt\n" + hunk() * 201, "more than 200"),
    ],
)
def test_patches_that_do_not_apply_are_refused(patch, message):
    with pytest.raises(ToolProblem, match=message):
        patched(patch)


def test_a_patch_applies_whole_or_not_at_all():
    tree = Tree(BASE, {})
    with pytest.raises(ToolProblem):
        apply_patch(tree, "--- a/a.txt\n+++ b/a.txt\n" + hunk() + "--- a/b.txt\n+++ b/b.txt\n@@ -1 +1 @@\n-y\n+z\n")
    assert tree.layer == {}


LINE = st.text(alphabet="ab -+@\x0c\r\u2028", max_size=6)
TEXT = st.lists(LINE, max_size=12).map("\n".join)


@given(TEXT, TEXT)
def test_whatever_difflib_writes_is_applied(before, after):
    sides = [ended_lines(f"{text}\n") for text in (before, after)]
    patch = "".join(difflib.unified_diff(sides[0], sides[1], "a/f", "b/f"))
    if patch:
        tree, _ = apply_patch(Tree({"f": f"{before}\n".encode()}, {}), patch)
        assert tree.text("f") == f"{after}\n"
