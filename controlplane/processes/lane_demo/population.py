"""Who uses the lane: 80 simulated people with hidden wishes, three who mean it ill, and others held out.

Everything random is drawn from the seed, the person and how many replies the person has had, so that a population
behaves the same whatever order the network answers in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from controlplane.processes.lane_demo.judgement import PERSONAS, Persona, read, satisfied

PEOPLE = 80
HELDOUT_PEOPLE = 40
SLIPS = 0.10  # how often a person presses the other thumb
WORDS_MISREAD = 1.5  # standard deviation
FOLLOWUPS = 0.2  # how often a thumb down comes with another try
SHORTEST_DELAY_S, MEAN_DELAY_S, LONGEST_DELAY_S = 0.2, 1.5, 6.0
FLOOD = 12  # thumbs of the flooder for one reply
FORGERIES = 2  # forged events for one reply

THUMBS, FOLLOWUP = "thumbs", "dissatisfied_followup"


class Temper(StrEnum):
    """How somebody means it."""

    HONEST = "honest"
    FLOODER = "flooder"  # likes everything, many times over
    CONTRARY = "contrary"  # always answers, and always the opposite
    FORGER = "forger"  # sends thumbs whose signatures are forged


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with a user key."""

    key: str
    persona: Persona
    temper: Temper = Temper.HONEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """One feedback event to be sent, so many seconds after the reply came."""

    signal: str
    value: bool
    delay_s: float
    forged: bool = False
    slip: bool = False


def people(seed: int) -> list[Person]:
    """The population: 80 people in the personas' shares, and one of each ill temper."""
    honest = [Person(f"user-{number:03d}", persona) for number, persona in enumerate(_personas(PEOPLE, seed))]
    ill = [temper for temper in Temper if temper is not Temper.HONEST]
    strict = PERSONAS[0]
    return [*honest, *(Person(f"user-{temper.value}", strict, temper) for temper in ill)]


def heldout_personas(seed: int) -> list[Persona]:
    """People whom the lane never meets: what they would think of a reply is measured, and never sent."""
    return _personas(HELDOUT_PEOPLE, seed + 1)


def react(person: Person, text: str, *, seed: int, number: int) -> list[Reaction]:
    """What the person sends about their `number`th reply; nothing is silence."""
    draw = random.Random(f"{seed}/{person.key}/{number}")
    happy = satisfied(person.persona, read(text), words_misread=draw.gauss(0.0, WORDS_MISREAD))
    delay = min(LONGEST_DELAY_S, SHORTEST_DELAY_S + draw.expovariate(1 / MEAN_DELAY_S))
    if person.temper is Temper.FLOODER:
        return [Reaction(signal=THUMBS, value=True, delay_s=delay)] * FLOOD
    if person.temper is Temper.FORGER:
        return [Reaction(signal=THUMBS, value=True, delay_s=delay, forged=True)] * FORGERIES
    if person.temper is Temper.CONTRARY:
        return [Reaction(signal=THUMBS, value=not happy, delay_s=delay)]
    if draw.random() >= person.persona.answer_rate:
        return []
    slip = draw.random() < SLIPS
    reactions = [Reaction(signal=THUMBS, value=happy != slip, delay_s=delay, slip=slip)]
    if not happy and draw.random() < FOLLOWUPS:
        reactions.append(Reaction(signal=FOLLOWUP, value=True, delay_s=delay))
    return reactions


def _personas(count: int, seed: int) -> list[Persona]:
    """`count` personas in their shares, the largest remainders first, in an order drawn from the seed."""
    wanted = [persona.share * count for persona in PERSONAS]
    counts = [int(share) for share in wanted]
    byremainder = sorted(range(len(PERSONAS)), key=lambda index: counts[index] - wanted[index])
    for index in byremainder[: count - sum(counts)]:
        counts[index] += 1
    drawn = [persona for persona, number in zip(PERSONAS, counts, strict=True) for _ in range(number)]
    random.Random(f"personas/{seed}").shuffle(drawn)
    return drawn
