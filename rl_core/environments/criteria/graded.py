"""What graders are given, and what they answer with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl_core.environments.criteria.outside import Outside
from rl_core.environments.judgement import Judgement
from rl_core.environments.tasks import Task
from rl_core.errors import GraderRefused, SandboxRefused, TaskSetError
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Role, Trajectory

MAX_MATCHED_CHARS = 20_000


class Verdict(msgspec.Struct, frozen=True):
    """A criterion's value in [0, 1] and why."""

    value: float
    reason: str


@dataclass(frozen=True)
class Graded:
    """What a criterion may look at.

    `asked` is the criterion's own text. `signals` are what users said of it, by the signal's name, where that is known.
    `judged` keeps each oracle's judgement: several criteria read one, and it is asked once.
    """

    task: Task
    trajectory: Trajectory
    sandbox: Sandbox | None
    outside: Outside | None = None
    signals: Mapping[str, float] = field(default_factory=dict)
    asked: str = ""
    judged: dict[str, Judgement] = field(default_factory=dict)

    @property
    def last_turn(self) -> str:
        """The last thing the policy said."""
        turns = [m.content for m in self.trajectory.messages if m.role is Role.ASSISTANT and m.segment >= 0]
        return turns[-1] if turns else ""

    def text(self, artifact: str) -> str:
        """An artefact, empty where there is none; or the last turn, where no artefact is named."""
        return self.trajectory.artifacts.get(artifact, "") if artifact else self.last_turn

    def reference(self, key: str) -> Any:
        """A value of the task's reference. Raises: TaskSetError when the task has none."""
        try:
            return self.task.reference[key]
        except KeyError:
            raise TaskSetError(f"task {self.task.id} has no reference {key!r}, which its rubric needs") from None

    def need_sandbox(self) -> Sandbox:
        """Where to run what a model wrote. Raises: SandboxRefused."""
        if self.sandbox is None:
            raise SandboxRefused("this grader runs model-written code and needs sandboxd; start it with `manage.py up`")
        return self.sandbox

    def need_outside(self) -> Outside:
        """How to ask graders elsewhere. Raises: GraderRefused."""
        if self.outside is None:
            raise GraderRefused("judges and remote graders are not asked here: what is graded here may not leave")
        return self.outside


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parameters: unknown keys are refused."""


class NoParams(Params, frozen=True):
    """A kind without parameters."""
