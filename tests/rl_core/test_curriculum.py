"""Draws are those of the seed, every task is looked at again, and what may still be learned from is drawn most."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.curriculum import Course, Difficulty, Tries, difficulty, draws_of_step, lap_task, settled
from rl_core.errors import SpecError
from rl_core.specs import CurriculumKind, CurriculumSpec

VARIANCE = CurriculumSpec(kind=CurriculumKind.VARIANCE)


def course(*, tasks: int = 40, prompts: int = 4, seed: int = 1, spec: CurriculumSpec = VARIANCE) -> Course:
    return Course(seed=seed, stage=0, prompts_per_step=prompts, tasks=tasks, spec=spec)


def passed(passes: int, of: int) -> Tries:
    return Tries(of, passes, passes)


@pytest.mark.parametrize(
    ("tries", "mean", "variance"),
    [
        (Tries(0, 0.0, 0.0), 0.5, 0.25),
        (passed(1, 2), 0.5, 0.25),
        (passed(8, 8), 0.9, 0.09),
        (passed(0, 8), 0.1, 0.09),
        # four attempts at 0.5 each do not differ: (2 + 1) / 6 and (1 + 1) / 6 less its square
        (Tries(4, 2.0, 1.0), 0.5, 1 / 12),
    ],
)
def test_estimates_are_shrunken_towards_even_odds(tries, mean, variance):
    known = difficulty(tries, prior=2.0)
    assert known.attempts == tries.attempts
    assert known.mean == pytest.approx(mean)
    assert known.variance == pytest.approx(variance)


@given(n=st.integers(0, 500), p=st.floats(0, 1), prior=st.floats(0.1, 50))
def test_an_estimate_lies_between_what_was_seen_and_the_prior(n, p, prior):
    known = difficulty(Tries(n, n * p, n * p * p), prior=prior)
    assert min(p, 0.5) - 1e-9 <= known.mean <= max(p, 0.5) + 1e-9
    assert 0 <= known.variance <= 0.25 + 1e-9


@pytest.mark.parametrize(
    ("attempts", "mean", "is_settled"),
    [(16, 0.95, True), (16, 0.05, True), (15, 0.95, False), (16, 0.5, False), (400, 0.9, True), (400, 0.1, True)],
)
def test_a_task_is_settled_by_enough_attempts_that_agree(attempts, mean, is_settled):
    assert settled(Difficulty(attempts, mean, 0.1), VARIANCE) is is_settled


def test_uniform_draws_are_seeded_laps_over_all_tasks():
    uniform = course(tasks=10, prompts=4, spec=CurriculumSpec())
    drawn = [task for step in range(5) for task in draws_of_step(uniform, step, {3: passed(100, 100)})]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert drawn == [lap_task(uniform, place) for place in range(20)]


@given(seed=st.integers(0, 9), step=st.integers(0, 99), known=st.dictionaries(st.integers(0, 39), st.integers(0, 20)))
def test_draws_are_those_of_the_seed_and_of_what_is_known(seed, step, known):
    tries = {task: passed(passes, 20) for task, passes in known.items()}
    drawn = draws_of_step(course(seed=seed), step, tries)
    assert drawn == draws_of_step(course(seed=seed), step, dict(reversed(tries.items())))
    assert len(drawn) == 4
    assert all(0 <= task < 40 for task in drawn)


def test_solved_and_hopeless_tasks_are_drawn_by_exploration_alone_and_each_in_time():
    known = {task: passed(64, 64) for task in range(15)} | {task: passed(0, 64) for task in range(15, 30)}
    drawn = [task for step in range(400) for task in draws_of_step(course(), step, known)]
    of_settled = [task for task in drawn if task < 30]
    # a fifth of all draws goes over all 40 tasks, of which 30 are settled
    assert len(of_settled) == pytest.approx(len(drawn) * 0.2 * 30 / 40, rel=0.02)
    for task in range(40):
        seen = [place for place, one in enumerate(drawn) if one == task]
        gaps = [b - a for a, b in zip([0, *seen], seen, strict=False)]
        assert max(gaps) <= 2 * 40 / 0.2, "no task is forgotten: two laps of exploration at most lie between"


def test_tasks_are_drawn_in_proportion_to_what_their_attempts_differ():
    even, uneven = passed(32, 64), passed(8, 64)  # variance 0.25, and about 0.117
    known = {task: even if task < 20 else uneven for task in range(40)}
    spec = CurriculumSpec(kind=CurriculumKind.VARIANCE, explore=0.01)
    one_a_step = course(prompts=1, spec=spec)
    drawn = Counter(draws_of_step(one_a_step, step, known)[0] for step in range(4000))
    first, second = sum(drawn[task] for task in range(20)), sum(drawn[task] for task in range(20, 40))
    expected = difficulty(even, prior=2.0).variance / difficulty(uneven, prior=2.0).variance
    assert first / second == pytest.approx(expected, rel=0.1)


def test_a_step_draws_no_task_twice_while_there_are_others():
    for step in range(200):
        drawn = draws_of_step(course(tasks=12, prompts=8), step, {})
        assert len(set(drawn)) == 8


def test_with_nothing_left_to_learn_all_tasks_come_in_turn():
    known = {task: passed(64, 64) for task in range(40)}
    drawn = Counter(task for step in range(100) for task in draws_of_step(course(), step, known))
    assert set(drawn) == set(range(40))


@pytest.mark.parametrize(
    "values",
    [{"explore": 0.0}, {"explore": 1.1}, {"settled_after": 0}, {"prior_attempts": 0}, {"solved_from": 0.1}],
)
def test_a_curriculum_that_cannot_be_is_refused(values):
    with pytest.raises(SpecError):
        CurriculumSpec(kind=CurriculumKind.VARIANCE, **values)
