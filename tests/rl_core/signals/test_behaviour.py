"""Counts of one answer, on sentences that were written to tell cases apart."""

import pytest

from rl_core.signals.behaviour import behaviour_of, edits_files
from rl_core.types import ToolCall


def call(tool, *, ok=True):
    return ToolCall(tool=tool, arguments="{}", result="", ok=ok, turn=0)


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I’m sorry, I cannot do that.", True),
        ("I am unable to open this file.", True),
        ("I won't write that code for you.", True),
        ("As an AI language model, I have no opinion.", True),
        ("I must decline to answer.", True),
        ("Sorry for the delay! Here is the patch.", False),
        ("You can't help but notice the pattern.", False),
        ("I can't believe how well this works. Here it is:", False),
        ("Done. " * 60 + "I cannot help with the rest.", False),
        ("", False),
    ],
)
def test_refusals(text, refuses):
    assert behaviour_of(text)["refusal"] is refuses


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("Which file do you mean?", True),
        ('Do you mean "main.py"?) ', True),
        ("Why? Because it is faster.", False),
        ("Here is the code.", False),
        ("", False),
    ],
)
def test_questions(text, asks):
    assert behaviour_of(text)["question"] is asks


def test_a_question_beside_a_call_is_none_to_the_user():
    assert behaviour_of("Shall we see?", [call("search")])["question"] is False


def test_calls_invalid_calls_and_edits_are_counted():
    calls = [call("edit_file"), call("search"), call("", ok=False), call("write_file", ok=False)]
    counts = behaviour_of("", calls, tokens=9)
    assert counts == {
        "tokens": 9,
        "refusal": False,
        "question": False,
        "tool_calls": 4,
        "invalid_tool_calls": 2,
        "edits": 1,
    }


def test_diffs_in_the_text_are_edits():
    text = "Change this:\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n\n*** Begin Patch\n"
    assert behaviour_of(text)["edits"] == 2
    assert behaviour_of("---\ntitle: x\n---")["edits"] == 0


@pytest.mark.parametrize("tool", ["edit_file", "applyPatch", "fs.write", "str_replace", "create-file", "file_delete"])
def test_tools_that_edit(tool):
    assert edits_files(tool)


@pytest.mark.parametrize("tool", ["read_file", "credit_check", "creator", "search", "overwritten", ""])
def test_tools_that_do_not(tool):
    assert not edits_files(tool)
