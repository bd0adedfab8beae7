"""What simulated people think of replies, by value."""

import pytest

from controlplane.processes.lane_demo.judgement import PERSONAS, Reading, read, satisfied

STRICT, HURRIED, EASY, PATIENT = PERSONAS


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("Bees make honey.", Reading(complete=True, words=3, preamble=False, question=False)),
        ("  Bees make honey and", Reading(complete=False, words=4, preamble=False, question=False)),
        ("bees make honey.", Reading(complete=False, words=3, preamble=False, question=False)),
        ("Honey.", Reading(complete=False, words=1, preamble=False, question=False)),
        ("", Reading(complete=False, words=0, preamble=False, question=False)),
        ("8 legs it has.", Reading(complete=True, words=4, preamble=False, question=False)),
        ('"Bees make honey."', Reading(complete=True, words=3, preamble=False, question=False)),
        ("Sure! Bees make honey.", Reading(complete=True, words=4, preamble=True, question=False)),
        ("Surely bees make honey.", Reading(complete=True, words=4, preamble=False, question=False)),
        ("Do you like honey?", Reading(complete=True, words=4, preamble=False, question=True)),
    ],
)
def test_what_is_noticed(text, reading):
    assert read(text) == reading


def words(count: int) -> str:
    return " ".join(["Word"] * count) + "."


@pytest.mark.parametrize(
    ("text", "happy"),
    [
        ("Bees make honey.", [STRICT, HURRIED, EASY, PATIENT]),
        ("Sure, bees make honey.", [HURRIED, EASY]),
        ("Bees make honey, do you like it?", [EASY, PATIENT]),
        (words(15), [STRICT, EASY, PATIENT]),
        (words(16), [STRICT, EASY, PATIENT]),
        (words(17), [PATIENT]),
        (words(21), []),
        ("Bees make", []),
    ],
)
def test_who_is_satisfied(text, happy):
    assert [persona for persona in PERSONAS if satisfied(persona, read(text))] == happy


def test_a_length_that_seems_longer_than_it_is():
    assert satisfied(STRICT, read(words(16)), words_misread=0.0)
    assert not satisfied(STRICT, read(words(16)), words_misread=0.5)


def test_the_personas_are_a_whole_population_of_which_56_per_cent_answer():
    assert sum(persona.share for persona in PERSONAS) == pytest.approx(1.0)
    assert sum(persona.share * persona.answer_rate for persona in PERSONAS) == pytest.approx(0.56)
