"""What environments of one function share: the tool that runs a candidate on its visible tests, and its world.

The tool and the grader are the oracle outside: no test's outcome is decided where the policy's code runs.
"""

from __future__ import annotations

from typing import Any

from rl_core.environments.criteria.oracles import read_cases
from rl_core.environments.oracle import judge_cases
from rl_core.environments.tasks import Task
from rl_core.environments.tool_syntax import Tags, TagSyntax, Tool
from rl_core.environments.world import SandboxWorld, ToolResult, World
from rl_core.errors import SandboxRefused
from rl_core.sandbox.protocol import Sandbox

PASS = "PASS"  # noqa: S105
RUN = Tool(
    name="run",
    description="PASS, or what the code gives in the first visible test that fails.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
        "additionalProperties": False,
    },
)
SYNTAX = TagSyntax(
    tags=(Tags(tool=RUN.name, argument="code", open="<run>", close="</run>"),),
    complaint="Error: write <run>CODE</run>",
)


async def run_candidate(sandbox: Sandbox, task: Task, arguments: dict[str, Any]) -> ToolResult:
    """The tool: PASS, or what the candidate gave on a visible test. Raises: WorldError."""
    code = str(arguments["code"])
    report = await judge_cases(
        sandbox,
        code=code,
        function=str(task.reference["function"]),
        cases=read_cases(task.id, task.reference["visible"]),
    )
    text = PASS if report.passed else report.first_failure
    return ToolResult(text=text, ok=report.passed, solved=report.passed, artifacts={"candidate": code})


def open_world(sandbox: Sandbox | None) -> World:
    """A world whose tool runs code through sandboxd. Raises: SandboxRefused without one."""
    if sandbox is None:
        raise SandboxRefused(
            "this environment runs model-written code and needs sandboxd; start it with `python -m rl_core.sandbox`"
        )
    return SandboxWorld(sandbox, {RUN.name: run_candidate})
