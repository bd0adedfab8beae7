"""What an environment is made of: a prompt, tools, a world, a rubric and a task set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rl_core.environments.proof import Proof
from rl_core.environments.reward import Rubric
from rl_core.environments.tasks import Task, TaskSet
from rl_core.environments.tool_syntax import JSON_SYNTAX, BadCall, Call, CallSyntax, JsonSyntax, Tool
from rl_core.environments.world import World
from rl_core.sandbox.protocol import Sandbox
from rl_core.session_specs import CompactionSpec, Limits
from rl_core.types import Message, Role, SamplingParams

NO_COMPACTION = CompactionSpec()


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One environment. Pure data and functions: any process can hold it.

    `messages` renders a task as the conversation's opening, worked examples included. `open_world` makes the world
    that serves every session of a worker; it raises SandboxRefused when `needs_sandbox` and none is given. Without
    `tools` an episode is one reply. `syntax` is how the policy writes calls, `tool_role` who their results come from.
    A run's stage may set other limits.
    `demonstration` gives the assistant turns of a perfect attempt: for the contract test, and for fine-tuning.
    `proof`, where tasks bring tests, runs them before the fix and with the reference solution: task sets that are
    uploaded are held to it.
    """

    slug: str
    title: str
    description: str
    tools: tuple[Tool, ...] = ()
    syntax: CallSyntax = JSON_SYNTAX
    tool_role: Role = Role.TOOL
    needs_sandbox: bool
    rubric: Rubric
    sampling: SamplingParams
    max_turns: int
    max_context_tokens: int = 1024
    max_parallel_calls: int = 1
    compaction: CompactionSpec = NO_COMPACTION
    messages: Callable[[Task], list[Message]]
    open_world: Callable[[Sandbox | None], World]
    build_task_set: Callable[[], TaskSet]
    demonstration: Callable[[Task], list[str]]
    proof: Callable[[Sandbox, Task], Awaitable[Proof]] | None = None

    @property
    def limits(self) -> Limits:
        """Where a session ends when no run says otherwise."""
        return Limits(
            max_turns=self.max_turns,
            max_context_tokens=self.max_context_tokens,
            max_parallel_calls=self.max_parallel_calls,
            compaction=self.compaction,
        )

    def find_calls(self, text: str) -> list[Call | BadCall]:
        """The calls in a turn, in order; none where there are no tools."""
        return self.syntax.find(self.tools, text) if self.tools else []

    def stops(self, *, parallel: int) -> tuple[str, ...]:
        """Texts at which the generation of a turn stops, where a turn may make `parallel` calls."""
        return self.syntax.stops(parallel=parallel) if self.tools else ()

    def offered(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's shape, where the policy is to be told of them; a prompt explains its own tags."""
        return [tool.offered() for tool in self.tools] if isinstance(self.syntax, JsonSyntax) else []
