"""The task set of the demonstration is fixed, and its held-out split is out of training's reach."""

import re

from rl_core.environments import word_problems
from rl_core.types import Split

FIRST_TRAIN = ["train-fruit-87-25", "train-cars-54-15"]


def test_sizes_and_the_fixed_content():
    tasks = word_problems.build_task_set()
    assert len(tasks.split(Split.TRAIN)) == 2000
    assert len(tasks.split(Split.HELDOUT)) == 120
    assert tasks.content_hash == word_problems.build_task_set().content_hash
    assert [t.id for t in tasks.split(Split.TRAIN)[:2]] == FIRST_TRAIN


def test_heldout_numbers_and_one_template_are_unseen():
    tasks = word_problems.build_task_set()
    numbers = {
        split: {n for task in tasks.split(split) for n in re.findall(r"\d+", task.input["question"])} for split in Split
    }
    assert not numbers[Split.TRAIN] & numbers[Split.HELDOUT]
    templates = {split: {task.reference["template"] for task in tasks.split(split)} for split in Split}
    assert templates[Split.HELDOUT] - templates[Split.TRAIN] == {"seats"}


def test_no_number_of_an_example_is_a_training_answer():
    tasks = word_problems.build_task_set()
    questions = {task.input["question"] for task in tasks.tasks}
    assert not questions & {question for question, _, _ in word_problems._EXAMPLES}


def test_the_tool_never_raises_at_the_policy():
    task = word_problems.build_task_set().tasks[0]
    for text in ("1/0", "", "9**9**9", "\0", "x" * 10**6, "(" * 10**5):
        result = word_problems.run_calculator(task, {"expression": text})
        assert not result.ok
        assert result.text.startswith("Error: ")
