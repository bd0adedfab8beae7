"""What the simulated people want of a reply. Nothing but the simulator knows this: no rubric, no map, no gate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_PREAMBLE = re.compile(
    r"\W*(?:sure|certainly|of course|absolutely|definitely|okay|ok|great question|good question|thank you|thanks"
    r"|hello|hi|well|here is|here are|here's|i'm happy|i'd be happy|the answer is|as an ai)\b",
    re.IGNORECASE,
)
_FEWEST_WORDS = 3


class Wish(StrEnum):
    """One thing that somebody may want of a reply."""

    COMPLETE = "complete"  # whole sentences: it begins with a capital and is not cut off
    SHORT = "short"  # no more words than the person's patience lasts for
    DIRECT = "direct"  # no preamble
    NO_QUESTION = "no_question"  # nothing is asked back


@dataclass(frozen=True, slots=True)
class Reading:
    """What a person notices of a reply."""

    complete: bool
    words: int
    preamble: bool
    question: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Persona:
    """A kind of person. `share` is of the population, `answer_rate` of the replies that get a thumb."""

    name: str
    share: float
    wishes: frozenset[Wish]
    most_words: int
    answer_rate: float


PERSONAS = (
    Persona(name="strict", share=0.25, wishes=frozenset(Wish), most_words=16, answer_rate=0.75),
    Persona(
        name="hurried",
        share=0.25,
        wishes=frozenset({Wish.COMPLETE, Wish.SHORT, Wish.NO_QUESTION}),
        most_words=14,
        answer_rate=0.60,
    ),
    Persona(name="easy", share=0.30, wishes=frozenset({Wish.COMPLETE, Wish.SHORT}), most_words=16, answer_rate=0.45),
    Persona(
        name="patient",
        share=0.20,
        wishes=frozenset({Wish.COMPLETE, Wish.SHORT, Wish.DIRECT}),
        most_words=20,
        answer_rate=0.4375,
    ),
)


def read(text: str) -> Reading:
    """Look at a reply."""
    plain = text.strip()
    words = len(plain.split())
    starts = plain[:1].isupper() or plain[:1].isdigit() or plain[:1] in {'"', "“"}
    ends = plain.rstrip("\"”'").endswith((".", "!", "?"))
    return Reading(
        complete=words >= _FEWEST_WORDS and starts and ends,
        words=words,
        preamble=_PREAMBLE.match(plain) is not None,
        question="?" in plain,
    )


def satisfied(persona: Persona, reading: Reading, *, words_misread: float = 0.0) -> bool:
    """Whether every wish of the persona is met. `words_misread` is by how much the length seems other than it is."""
    met = {
        Wish.COMPLETE: reading.complete,
        Wish.SHORT: reading.words + words_misread <= persona.most_words,
        Wish.DIRECT: not reading.preamble,
        Wish.NO_QUESTION: not reading.question,
    }
    return all(met[wish] for wish in persona.wishes)
