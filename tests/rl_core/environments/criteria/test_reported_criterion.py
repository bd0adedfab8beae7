"""Scores that a remote environment reported, as criteria."""

import pytest

from rl_core.environments.remote.environment import rubric_of
from rl_core.environments.reward import Criterion, Rubric, combine, grade
from rl_core.environments.tasks import Task
from rl_core.errors import EnvironmentFault
from rl_core.types import Split, Trajectory

TASK = Task(id="t", split=Split.TRAIN, input={"q": 1})


def played(**reported: float) -> Trajectory:
    return Trajectory(task_id="t", messages=[], segments=[], reported=reported)


async def test_the_reward_is_what_was_reported():
    scores = await grade(rubric_of("shop"), task=TASK, trajectory=played(reward=0.25), sandbox=None)
    assert [(score.key, score.value, score.reason) for score in scores] == [("reported", 0.25, "as reported")]
    assert combine(rubric_of("shop"), scores) == 0.25


async def test_several_scores_are_weighed():
    kinds = {"style": 1.0, "outcome": 3.0}
    rubric = Rubric(
        slug="shop",
        criteria=tuple(
            Criterion(key=name, text=name, kind="reported", weight=weight, params={"name": name})
            for name, weight in kinds.items()
        ),
    )
    scores = await grade(rubric, task=TASK, trajectory=played(style=0.0, outcome=1.0), sandbox=None)
    assert combine(rubric, scores) == 0.75


async def test_a_score_that_was_not_reported_is_an_error_and_never_a_value():
    scores = await grade(rubric_of("shop"), task=TASK, trajectory=played(style=1.0), sandbox=None)
    assert scores[0].value is None
    assert "reported no score 'reward'; it reported style" in scores[0].error
    with pytest.raises(EnvironmentFault):
        combine(rubric_of("shop"), scores)
