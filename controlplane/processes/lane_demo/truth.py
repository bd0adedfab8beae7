"""What the population truly thinks: held-out people judge replies to held-out questions, before and after.

The replies are asked for without a user key: they come from the promoted version, are part of no experiment, are
trained on by nobody, and no feedback is sent about them. Each question has the same seeds both times.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import openai

from controlplane.processes.errors import DemoFault
from controlplane.processes.lane_demo.judgement import Persona, read, satisfied
from controlplane.processes.lane_demo.traffic import AT_ONCE, PAUSE_S, TIMEOUT_S, TRIES, Doors
from controlplane.selectors.run_summary import Gain
from controlplane.selectors.statistics import crossed_interval, paired_interval
from rl_core.environments.criteria import first_fact
from rl_core.environments.short_replies import MAX_TOKENS
from rl_core.environments.tasks import Task

REPLIES_A_QUESTION = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """What one version says to the held-out questions: for each task's id, some replies."""

    version: str
    replies: dict[str, tuple[str, ...]]


def sample_replies(
    *, doors: Doors, version: str, tasks: Sequence[Task], seed: int, show: Callable[[str], None] = lambda text: None
) -> Sample:
    """Ask everything of the version that the lane has promoted. Raises: DemoFault when another one answers."""
    return asyncio.run(_sample(doors, version, tasks, seed, show))


async def _sample(doors: Doors, version: str, tasks: Sequence[Task], seed: int, show: Callable[[str], None]) -> Sample:
    gate, done = asyncio.Semaphore(AT_ONCE), 0

    async def ask(task: Task, attempt: int) -> str:
        nonlocal done
        async with gate:
            text = await _ask(client, doors, version, task, random.Random(f"{seed}/{task.id}/{attempt}"))
        done += 1
        show(f"held-out questions: {done} of {len(tasks) * REPLIES_A_QUESTION} replies")
        return text

    async with openai.AsyncOpenAI(
        base_url=f"{doors.url}/v1", api_key=doors.gateway_key, timeout=TIMEOUT_S, max_retries=TRIES
    ) as client:
        asked = [ask(task, attempt) for task in tasks for attempt in range(REPLIES_A_QUESTION)]
        texts = await asyncio.gather(*asked)
    replies = {
        task.id: tuple(texts[index * REPLIES_A_QUESTION : (index + 1) * REPLIES_A_QUESTION])
        for index, task in enumerate(tasks)
    }
    return Sample(version, replies)


async def _ask(client: openai.AsyncOpenAI, doors: Doors, version: str, task: Task, draw: random.Random) -> str:
    """One reply of that version. For a moment after a promotion the gateway still asks the one before."""
    seed = draw.getrandbits(31)
    for _ in range(TRIES):
        answer = await client.chat.completions.create(
            model=doors.lane,
            messages=[{"role": "user", "content": str(task.input["question"])}],
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            seed=seed,
        )
        if answer.system_fingerprint == version:
            return answer.choices[0].message.content or ""
        await asyncio.sleep(PAUSE_S)
    raise DemoFault(f"lane {doors.lane} answers with {answer.system_fingerprint}, not with the promoted {version}")


def satisfaction_gain(before: Sample, after: Sample, people: Sequence[Persona]) -> Gain:
    """The change of the share of these people who are satisfied, with an interval over questions and people."""
    first, last = _judged(before, people), _judged(after, people)
    cells = [
        [later - earlier for earlier, later in zip(one, other, strict=True)]
        for one, other in zip(first, last, strict=True)
    ]
    levels = [fmean(map(fmean, rows)) for rows in (first, last)]
    return Gain(before=levels[0], after=levels[1], difference=crossed_interval(cells))


def fact_gain(before: Sample, after: Sample, tasks: Sequence[Task]) -> Gain:
    """The change of the share of replies that have a key word of the right answer, with an interval over questions."""
    first, last = _truthful(before, tasks), _truthful(after, tasks)
    difference = paired_interval([later - earlier for earlier, later in zip(first, last, strict=True)])
    return Gain(before=fmean(first), after=fmean(last), difference=difference)


def _judged(sample: Sample, people: Sequence[Persona]) -> list[list[float]]:
    """A row for each question, in it for each person the share of the replies that satisfy them."""
    rows = []
    for texts in sample.replies.values():
        readings = [read(text) for text in texts]
        rows.append([fmean(satisfied(person, reading) for reading in readings) for person in people])
    return rows


def _truthful(sample: Sample, tasks: Sequence[Task]) -> list[float]:
    return [fmean(bool(first_fact(text, task.reference["fact"])) for text in sample.replies[task.id]) for task in tasks]
