"""What an environment is made of: a prompt, a tool, a world, a rubric and a task set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_core.environments.reward import Rubric
from rl_core.environments.tasks import Task, TaskSet
from rl_core.environments.tool_syntax import ToolSyntax
from rl_core.environments.world import World
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Message, Role, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One environment. Pure data and functions: any process can hold it.

    `messages` renders a task as the conversation's opening, worked examples included. `open_world` makes the world
    that serves every session of a worker; it raises SandboxRefused when `needs_sandbox` and none is given. Without a
    `tool` an episode is one reply.
    `demonstration` gives the assistant turns of a perfect attempt: for the contract test, and for fine-tuning.
    """

    slug: str
    title: str
    description: str
    tool: ToolSyntax | None
    tool_role: Role
    needs_sandbox: bool
    rubric: Rubric
    sampling: SamplingParams
    max_turns: int
    messages: Callable[[Task], list[Message]]
    open_world: Callable[[Sandbox | None], World]
    build_task_set: Callable[[], TaskSet]
    demonstration: Callable[[Task], list[str]]
