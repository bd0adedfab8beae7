"""Task sets: what is wrong is named by its line."""

import json

import pytest

from rl_core.environments.tasks import MAX_LINE_BYTES, parse_task_set
from rl_core.errors import TaskSetError
from rl_core.types import Split


def line(task_id="a", split="train", question="q", **extra):
    return json.dumps({"id": task_id, "split": split, "input": {"q": question}, "reference": {"x": 1}, **extra})


def blob(*lines):
    return "\n".join(lines).encode()


def test_round_trip_and_splits():
    tasks = parse_task_set(blob(line("a"), "", line("b", "heldout", "other"), ""))
    assert [t.id for t in tasks.split(Split.TRAIN)] == ["a"]
    assert [t.id for t in tasks.split(Split.HELDOUT)] == ["b"]
    again = parse_task_set(tasks.to_jsonl())
    assert again == tasks
    assert again.content_hash == tasks.content_hash != parse_task_set(blob(line("a"))).content_hash


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((line("a"), "{"), "line 2: "),
        ((line("a"), "[]"), "line 2: Expected `object`"),
        ((line("a", hint="x"),), "line 1: .*unknown field `hint`"),
        ((line("a", split="test"),), "line 1: .*test"),
        ((line("a b"),), "line 1: id 'a b'"),
        ((line("a"), line("a", question="r")), "line 2: id 'a' is already on line 1"),
        ((line("a"), "", line("b")), r"line 3: same input as line 1 \(train\)"),
        ((line("a"), line("b", "heldout")), "line 2: leak: heldout task has the input of line 1"),
        (('{"id": "a", "split": "train", "input": {}}',), "line 1: input must not be empty"),
        ((line("a", question="x" * MAX_LINE_BYTES),), "line 1: longer than"),
        (("", " "), "empty"),
    ],
)
def test_broken_lines_are_named(lines, problem):
    with pytest.raises(TaskSetError, match=problem):
        parse_task_set(blob(*lines))


def test_bytes_that_are_no_text_are_named():
    with pytest.raises(TaskSetError, match="line 1: "):
        parse_task_set(b'{"id": "\xff", "split": "train", "input": {"a": 1}}')


def test_every_broken_line_counts_and_the_list_is_bounded():
    with pytest.raises(TaskSetError, match=r"30 broken lines; nothing was stored.*and 10 more"):
        parse_task_set(blob(*["{"] * 30))
