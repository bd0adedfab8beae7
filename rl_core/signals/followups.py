"""Dissatisfied follow-ups: does what a user writes next say that the answer before was no good?

A deterministic reader of English: weighted patterns, and the question asked once more. It costs microseconds and says
which patterns it saw. `python -m rl_core.signals measure` prints its precision and recall on a labelled set, part of
which was not looked at while the patterns were written. `judge` asks a language model instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

MAX_CHARACTERS: Final = 1_000
THRESHOLD: Final = 1.0
ASKED_AGAIN: Final = 0.6  # share of words that a question repeated has in common with the first


class _Cue(NamedTuple):
    """A pattern and what it says: above zero for dissatisfaction."""

    name: str
    weight: float
    pattern: re.Pattern[str]


def _cue(name: str, weight: float, pattern: str) -> _Cue:
    return _Cue(name, weight, re.compile(pattern, re.IGNORECASE))


_NOT = r"(?:n['’]?t|\s+not|\s+never)"
_DID = (
    "forgot|broke|deleted|removed|changed|skipped|left|missed|mixed|misunderstood|hallucinated|invented|introduced|"
    "keep|put|promised|only did|used|are using|using|answered|ignored|misread|threw|lost"
)
_FAILS = (
    r"fail(?:s|ing|ed)?|crash(?:es|ed|ing)?|hangs?|segfaults?|broken|breaks|throws?|exception|[A-Z]\w+Error|errors?:|"
    r"a\s+[45]\d\d|messed up|mess|never (?:ends|converges|stops)|blank|twice|duplicated|contradicts"
)
_BAD = (
    "wrong|incorrect|useless|worse|awful|terrible|bad (?:answer|idea)|completely off|off by|"
    "too (?:complicated|long|big|slow|short)|way too|nonsense|slower|ridiculous|embarrassing|half of|the opposite|"
    "in the middle of a sentence"
)
_GOOD = (
    "thanks|thank you|thx|cheers|awesome|excellent|brilliant|perfect|love it|exactly what|good catch|much better|"
    "that['’]s better|well done"
)
_DO = (
    "add|write|rename|explain|show|find|refactor|generate|remove|delete|check|compare|sort|bump|create|run|continue|"
    "move on|go on|translate|use the same|change|set|turn|summarize|start|make it|make the|put (?:it in|the)|"
    "let me try|do it|switch"
)
_CUES: Final = (
    _cue(
        "refusal", 1.0,
        r"^\W*(?:no|nope|nah|wrong|incorrect|ugh|sigh|argh|"
        r"come on|unfortunately)\b(?! (?:problem|worr))",
    ),
    _cue("undo", 1.2, r"^\W*(?:please\s+)?(?:undo|revert|restore)\b|\b(?:revert|undo)\s+(?:that|this|it)\b"),
    _cue(
        "put back", 1.2,
        r"\b(?:put|bring|give|want)\b.{0,60}\b(?:back|"
        r"the way it was)\b|\btake (?:it|that|this) out\b",
    ),
    _cue(
        "not asked", 1.5,
        rf"\bnot\s+(?:what|like that|quite|helpful|"
        rf"acceptable)\b|\b(?:is|was){_NOT}\s+(?:what|how)\s+I\b",
    ),
    _cue("told you", 1.2, r"\bI\s+(?:\w+\s+)?(?:said|told|asked|meant|wanted|need a)\b|\bas I said\b"),
    _cue("once more", 1.2, r"\b(?:again|once more)\s*[,:]|\bread (?:the|my) question\b"),
    _cue("you did", 1.2, rf"\byou(?:['’]re|r)?\s+(?:\w+\s+)?(?:{_DID}|did{_NOT})\b"),
    _cue(
        "stop", 1.2,
        r"\b(?:stop|quit)\s+\w+ing\b|\bnever\s+\w+\s+my\b|"
        r"\bdo(?:n['’]?t| not)\s+(?:touch|invent|change|add|remove)\b",
    ),
    _cue("does not", 1.0, rf"\b(?:do|does|did|is|was|are|wo|ca|could){_NOT}\s+\w"),
    _cue("cannot", 1.0, r"\b(?:cannot|can['’]?t|won['’]?t|undefined|no such|permission denied|deprecated)\b"),
    _cue("still", 1.0, r"\b(?:still|same)\b[^?]*$"),
    _cue("failure", 1.0, rf"\b(?:{_FAILS})\b"),
    _cue("verdict", 1.1, rf"\b(?:{_BAD})\b"),
    _cue(
        "absent", 1.0,
        r"\b(?:missing|gone|unused|none of|nothing happens|"
        r"I don['’]t see|does(?:n['’]t| not) exist)\b",
    ),
    _cue(
        "why did you", 1.1,
        r"\bwhy\s+(?:did|would|are|is)\s+(?:you|there)\b|"
        r"\bdid you even\b|\bcan you actually\b|\?\?|!!",
    ),
    _cue("only wanted", 0.8, r"\bI only wanted\b|\bnot a lecture\b|\bjust (?:make|give me)\b|\binstead of\b"),
    _cue("thanks", -1.6, rf"\b(?:{_GOOD})\b"),
    _cue(
        "praise", -1.2,
        r"^\W*(?:yes|yep|ok(?:ay)?|alright|fine|good|"
        r"great|nice|cool|very good|sounds good|not bad)\b",
    ),
    _cue(
        "works", -1.2,
        r"\b(?:looks good|works (?:now|great|like)|that (?:did|"
        r"fixed) it|that works|passes now|(?:ship|merge) it|are green)\b",
    ),
    _cue(
        "question", -0.8,
        r"^(?:and |so |ok )*(?:how|what|which|where|when|who|is|"
        r"are|could|can|does|do|why (?:does|do|not))\b[^?]*\?",
    ),
    _cue("next request", -0.9, rf"^\W*(?:now|next|then|and|also|let['’]?s|please)?[\s,]*(?:please\s+)?(?:{_DO})\b"),
    _cue(
        "new matter", -0.9,
        r"\b(?:next (?:task|step|on the list|ticket|file)|"
        r"new topic|new error in|another problem|one more)\b",
    ),
    _cue(
        "asks help", -0.9,
        r"\b(?:can you fix it|look into it|move on|in a different|"
        r"could you|the (?:user|customer)s? (?:say|complain))",
    ),
)  # fmt: skip
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class FollowUp:
    """What a follow-up says of the answer before it, and by which cues."""

    score: float
    cues: tuple[str, ...]

    @property
    def dissatisfied(self) -> bool:
        """Whether the cues add up to dissatisfaction."""
        return self.score >= THRESHOLD


def read_followup(text: str, *, previous: str = "") -> FollowUp:
    """Read a follow-up; `previous` is what the user had asked before. Only the first `MAX_CHARACTERS` are read."""
    text, previous = text[:MAX_CHARACTERS].strip(), previous[:MAX_CHARACTERS].strip()
    found = [cue for cue in _CUES if cue.pattern.search(text)]
    score = sum(cue.weight for cue in found)
    names = [cue.name for cue in found]
    if _alike(text, previous) >= ASKED_AGAIN:
        score += 1.5
        names.append("asked again")
    return FollowUp(round(score, 6), tuple(names))


def _alike(text: str, previous: str) -> float:
    """Words in common, of all words of both."""
    mine, before = (set(_WORD.findall(part.lower())) for part in (text, previous))
    return len(mine & before) / len(mine | before) if len(before) > 1 else 0.0
