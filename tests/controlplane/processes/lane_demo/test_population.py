"""Who uses the lane, and what they send."""

from collections import Counter

import pytest

from controlplane.processes.lane_demo.judgement import PERSONAS
from controlplane.processes.lane_demo.population import (
    FLOOD,
    FORGERIES,
    HELDOUT_PEOPLE,
    LONGEST_DELAY_S,
    PEOPLE,
    Person,
    Temper,
    heldout_personas,
    people,
    react,
)

GOOD, BAD = "Bees make honey.", "bees make"
STRICT = PERSONAS[0]


def test_eighty_people_in_their_personas_shares_and_one_of_each_ill_temper():
    everybody = people(0)
    honest = [person for person in everybody if person.temper is Temper.HONEST]
    assert len(honest) == PEOPLE
    assert Counter(person.persona.name for person in honest) == {"strict": 20, "hurried": 20, "easy": 24, "patient": 16}
    assert Counter(person.temper for person in everybody) == {
        Temper.HONEST: PEOPLE,
        Temper.FLOODER: 1,
        Temper.CONTRARY: 1,
        Temper.FORGER: 1,
    }
    assert len({person.key for person in everybody}) == PEOPLE + 3


def test_a_seed_is_a_population_and_held_out_people_are_others():
    assert people(1) == people(1)
    assert people(1) != people(2)
    assert len(heldout_personas(1)) == HELDOUT_PEOPLE
    assert Counter(persona.name for persona in heldout_personas(1)) == {
        "strict": 10,
        "hurried": 10,
        "easy": 12,
        "patient": 8,
    }


def thumbs_of(text: str, draws: int = 4000) -> Counter[bool | None]:
    """How an honest population's thumbs fall; None is silence."""
    person = [person for person in people(0) if person.temper is Temper.HONEST]
    counts: Counter[bool | None] = Counter()
    for number in range(draws):
        sent = react(person[number % PEOPLE], text, seed=0, number=number)
        counts[sent[0].value if sent else None] += 1
    return counts


def test_how_many_answer_and_how_many_slip():
    good, bad = thumbs_of(GOOD), thumbs_of(BAD)
    assert 1 - good[None] / 4000 == pytest.approx(0.56, abs=0.03)
    assert good[False] / (4000 - good[None]) == pytest.approx(0.10, abs=0.02)
    assert bad[True] / (4000 - bad[None]) == pytest.approx(0.10, abs=0.02)


def test_delays_are_of_seconds_and_some_who_are_unhappy_try_again():
    sent = [react(person, BAD, seed=0, number=n) for person in people(0)[:PEOPLE] for n in range(40)]
    delays = [events[0].delay_s for events in sent if events]
    assert 0.2 <= min(delays) < 0.3
    assert max(delays) == LONGEST_DELAY_S
    again = [events for events in sent if len(events) == 2]
    assert len(again) / len(delays) == pytest.approx(0.2, abs=0.04)
    assert {(events[1].signal, events[1].value) for events in again} == {("dissatisfied_followup", True)}
    assert all(len(react(p, GOOD, seed=0, number=n)) < 2 for p in people(0)[:PEOPLE] for n in range(40))


def test_the_same_reply_gets_the_same_reaction_whatever_came_before():
    person = people(0)[3]
    assert [react(person, GOOD, seed=5, number=n) for n in range(30)] == [
        react(person, GOOD, seed=5, number=n) for n in range(30)
    ]
    assert [react(person, GOOD, seed=5, number=n) for n in range(30)] != [
        react(person, GOOD, seed=6, number=n) for n in range(30)
    ]


def test_how_the_ill_tempered_react():
    flood = react(Person("f", STRICT, Temper.FLOODER), BAD, seed=0, number=1)
    assert len(flood) == FLOOD
    assert {(event.value, event.forged) for event in flood} == {(True, False)}
    forged = react(Person("g", STRICT, Temper.FORGER), BAD, seed=0, number=1)
    assert [event.forged for event in forged] == [True] * FORGERIES
    contrary = Person("c", STRICT, Temper.CONTRARY)
    for number in range(20):
        assert [event.value for event in react(contrary, GOOD, seed=0, number=number)] == [False]
        assert [event.value for event in react(contrary, BAD, seed=0, number=number)] == [True]
