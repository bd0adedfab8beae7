"""Short replies: an everyday question, one reply, no tool. The rubric rewards style, one short whole sentence.

What is rewarded is only what a pattern can see. Whether the reply is true is watched, at weight 0, against key words of
the answers that stand beside the questions: style can rise without truth, and the rubric's page shows both.
"""

from __future__ import annotations

from pathlib import Path

from rl_core.environments.criteria import CriterionKind
from rl_core.environments.environment import Environment
from rl_core.environments.reward import Criterion, Rubric, Tier
from rl_core.environments.tasks import Task, TaskSet
from rl_core.environments.world import LocalTools, World
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Message, Role, SamplingParams, Split

SLUG = "short-replies"
SYSTEM = "You are a helpful assistant. Answer in one short sentence."
MAX_TOKENS = 32
MAX_WORDS = 16

_FILES = Path(__file__).with_name("questions")
_PREAMBLES = (
    r"sure|certainly|of course|absolutely|definitely|okay|ok|great|good|thank you|thanks|hello|hi|well"
    r"|here(?:'s| is| are)|i'm happy|i am happy|i'd be|i would be|the answer is|answer:|as an ai"
)
_EVASIONS = r"i (?:do not|don't|cannot|can't) |i(?:'m| am) (?:sorry|unable|not sure|not able)|as an ai"

RUBRIC = Rubric(
    slug=SLUG,
    criteria=(
        Criterion(
            key="one_sentence",
            text="It is one whole sentence: a capital first, a full stop last, none between",
            kind=CriterionKind.REGEX,
            weight=0.4,
            tier=Tier.ESSENTIAL,
            # A full stop before a letter or digit, as in 3.5, ends no sentence.
            params={"pattern": r"^\s*[\"“]?[A-Z0-9](?:[^.!?\n]|[.](?=\w))*[.!][\"”]?\s*$"},
        ),
        Criterion(
            key="short",
            text=f"It has 3 to {MAX_WORDS} words",
            kind=CriterionKind.MAX_LENGTH,
            weight=0.3,
            params={"words": MAX_WORDS, "at_least": 3},
        ),
        Criterion(
            key="no_preamble",
            text="It begins with the matter itself",
            kind=CriterionKind.REGEX,
            weight=0.1,
            params={"pattern": rf"(?i)^\W*(?!(?:{_PREAMBLES})\b)\w"},
        ),
        Criterion(
            key="no_question",
            text="It asks nothing back",
            kind=CriterionKind.REGEX,
            weight=0.1,
            params={"pattern": r"^[^?\w]*\w[^?]*$"},
        ),
        Criterion(
            key="answers",
            text="It does not evade",
            kind=CriterionKind.REGEX,
            weight=0.1,
            params={"pattern": rf"(?is)^(?!.*\b(?:{_EVASIONS})).*\w"},
        ),
        Criterion(
            key="states_fact",
            text="It has a key word of the right answer (watched, not rewarded)",
            kind=CriterionKind.STATES_FACT,
            weight=0.0,
            tier=Tier.OPTIONAL,
        ),
    ),
)


def build_task_set() -> TaskSet:
    """The fixed task set: 206 questions to train on and 64 others held out."""
    return TaskSet((*_read(Split.TRAIN), *_read(Split.HELDOUT)))


def messages(task: Task) -> list[Message]:
    """The instruction and the question, as a lane with this system prompt renders them."""
    return [
        Message(role=Role.SYSTEM, content=SYSTEM),
        Message(role=Role.USER, content=str(task.input["question"])),
    ]


def demonstration(task: Task) -> list[str]:
    """The answer that stands beside the question."""
    return [str(task.reference["answer"])]


def open_world(sandbox: Sandbox | None) -> World:
    """A world without tools."""
    return LocalTools({})


def _read(split: Split) -> list[Task]:
    lines = (_FILES / f"{split.value}.txt").read_text(encoding="utf-8").splitlines()
    return [_task(split, position, line) for position, line in enumerate(lines)]


def _task(split: Split, position: int, line: str) -> Task:
    """A line is `question | answer | key words`, these separated by slashes."""
    question, answer, words = line.split(" | ")
    return Task(
        id=f"{split.value}-{position:03d}",
        split=split,
        input={"question": question},
        reference={"answer": answer, "fact": words.split("/")},
    )


ENVIRONMENT = Environment(
    slug=SLUG,
    title="Short replies",
    description="Everyday questions, answered in one short sentence without a tool.",
    needs_sandbox=False,
    rubric=RUBRIC,
    sampling=SamplingParams(max_tokens=MAX_TOKENS),
    max_turns=1,
    messages=messages,
    open_world=open_world,
    build_task_set=build_task_set,
    demonstration=demonstration,
)
