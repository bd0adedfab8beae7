"""What somebody else runs, as an environment of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import msgspec

from rl_core.environments.criteria import CriterionKind
from rl_core.environments.environment import Environment
from rl_core.environments.remote.client import RemoteClient, RemotePlace
from rl_core.environments.remote.messages import Described
from rl_core.environments.remote.protocol import Kind
from rl_core.environments.remote.world import RemoteWorld
from rl_core.environments.reward import Criterion, Rubric
from rl_core.environments.tasks import Task
from rl_core.environments.tool_syntax import Tool
from rl_core.environments.world import World
from rl_core.errors import RemoteProtocolError, SandboxRefused, SpecError, TaskSetError
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Message, Role, SamplingParams

SAMPLING = SamplingParams(max_tokens=512)
CONTEXT_TOKENS = 4096
PATIENCE_S = 5.0  # then whoever plays looks whether there is time left, and asks again


@dataclass(frozen=True)
class Remote:
    """A registered world or environment. `description` is what it said of itself, as JSON."""

    slug: str
    title: str
    kind: Kind
    place: RemotePlace = field(repr=False)
    description: bytes
    session_s: float
    max_turns: int

    @cached_property
    def environment(self) -> Environment:
        """As our harness and the catalogue see it. A whole environment has no tools of ours, no world and no prompt.

        Raises: SpecError when a tool of its description is none.
        """
        described = described_of(self.description)
        return Environment(
            slug=self.slug,
            title=self.title,
            description=f"remote {self.kind.value} at {self.place.url}",
            tools=tuple(
                Tool(name=tool.name, description=tool.description, parameters={"type": "object", **tool.parameters})
                for tool in described.tools
            ),
            needs_sandbox=False,
            rubric=rubric_of(self.slug),
            sampling=SAMPLING,
            max_turns=self.max_turns,
            max_context_tokens=CONTEXT_TOKENS,
            messages=lambda task: messages(task, system=described.system) if self.kind is Kind.WORLD else [],
            open_world=self._open_world,
            build_task_set=_nothing_ships,
            demonstration=lambda task: [],
        )

    def _open_world(self, sandbox: Sandbox | None) -> World:
        if self.kind is not Kind.WORLD:
            raise SandboxRefused(f"{self.slug} plays its sessions itself: it has no world for our harness")
        return RemoteWorld(RemoteClient(self.place, patience_s=PATIENCE_S))


def described_of(description: bytes) -> Described:
    """A description as it is kept. Raises: RemoteProtocolError."""
    try:
        return msgspec.json.decode(description, type=Described)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"the description is not of this version of the protocol: {error}") from error


def rubric_of(slug: str) -> Rubric:
    """The rubric that takes the reward as it was reported."""
    told = Criterion(key="reported", text="The reward that it reports", kind=CriterionKind.REPORTED, weight=1.0)
    return Rubric(slug=slug, criteria=(told,))


def messages(task: Task, *, system: str) -> list[Message]:
    """The opening of a session in a remote world: `messages` of the task's input, or its `prompt`.

    Raises: TaskSetError when it has neither.
    """
    given = task.input.get("messages")
    if given is None and isinstance(task.input.get("prompt"), str):
        given = [{"role": "user", "content": task.input["prompt"]}]
    try:
        opening = msgspec.convert(given, list[Message])
    except msgspec.ValidationError as error:
        raise TaskSetError(f"task {task.id}: its input needs a prompt, or messages with role and content") from error
    named = [Message(role=one.role, content=one.content, name=one.name) for one in opening]
    return [*([Message(role=Role.SYSTEM, content=system)] if system else []), *named]


def _nothing_ships() -> NoReturn:
    raise SpecError("a remote environment brings no task set: upload one")
