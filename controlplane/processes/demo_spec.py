"""The demonstration's run specs: recipes that were seen to learn on two cores."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from rl_core.environments.registry import ENVIRONMENTS
from rl_core.specs import OptimizerSpec, RlStage, RunSpec, resolve_run_spec


class DemoTask(StrEnum):
    """What the demonstration's model learns."""

    WORD_PROBLEMS = "word-problems"  # a calculator, two turns
    CODE_REPAIR = "code-repair"  # runs code in the sandbox


STEPS = {DemoTask.WORD_PROBLEMS: 18, DemoTask.CODE_REPAIR: 22}
LEARNING_RATE = {DemoTask.WORD_PROBLEMS: 3e-5, DemoTask.CODE_REPAIR: 2e-5}
# One version behind keeps the trainer busy on two cores; in the one run with two it learned less and won no time.
MAX_STALENESS = 1
# The longest session of either task is under 400 tokens; every engine reserves memory for this many in each place.
MAX_CONTEXT_TOKENS = 512
EVAL_TASKS = {DemoTask.WORD_PROBLEMS: 100, DemoTask.CODE_REPAIR: 12}


def demo_spec(
    *, task: DemoTask, model: str, clusters: tuple[str, ...], seed: int, steps: int | None = None
) -> dict[str, Any]:
    """The resolved spec of a demonstration run."""
    environment = ENVIRONMENTS[task.value]
    stage = RlStage(
        environment=environment.slug,
        task_set=environment.slug,
        rubric=environment.rubric.slug,
        steps=steps or STEPS[task],
        sampling=environment.sampling,
        max_turns=environment.max_turns,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_staleness=MAX_STALENESS,
        eval_tasks=EVAL_TASKS[task],
        optimizer=OptimizerSpec(learning_rate=LEARNING_RATE[task]),
    )
    spec = RunSpec(model=model, stages=(stage,), seed=seed, rollout_clusters=clusters)
    return resolve_run_spec(msgspec.convert(msgspec.to_builtins(spec), RunSpec))
