"""A session: one attempt at a task as plain data, stored between turns and taken up by any process."""

from __future__ import annotations

import msgspec
from blake3 import blake3

from rl_core.environments.tasks import Task
from rl_core.errors import TrajectoryError
from rl_core.session_specs import Limits
from rl_core.types import Message, SamplingParams, Trajectory

SESSION_FORMAT = 2


class SeedKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes an attempt's random numbers its own, and the same again when it is retried."""

    run_seed: int
    group: str
    attempt: int

    def of_turn(self, turn: int) -> int:
        """A seed below 2^48 for one turn: equal for equal keys, unrelated otherwise."""
        text = f"{self.run_seed}/{self.group}/{self.attempt}/{turn}"
        return int.from_bytes(blake3(text.encode()).digest(length=6), "big")


class Session(msgspec.Struct, kw_only=True):
    """One attempt at a task, between turns.

    `key` names it to its world; `world_state` is None until the world was opened. `wall_s` is what its turns took.
    While `summarising` the policy is asked for a summary next; `carried` are results that it reads only after it.
    """

    environment: str
    task: Task
    sampling: SamplingParams
    limits: Limits
    seed: SeedKey
    key: str
    trajectory: Trajectory
    world_state: bytes | None = None
    turn: int = 0
    wall_s: float = 0.0
    compactions: int = 0
    summarising: bool = False
    carried: list[Message] = []
    done: bool = False
    format: int = SESSION_FORMAT

    def to_bytes(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Session:
        """Decode. Raises: TrajectoryError."""
        try:
            session = msgspec.msgpack.decode(blob, type=cls)
        except msgspec.DecodeError as error:
            raise TrajectoryError(f"not a session blob: {error}") from error
        if session.format != SESSION_FORMAT:
            raise TrajectoryError(f"session format {session.format} is unknown to this build; start the rollout again")
        session.trajectory.validate()
        return session

    def draft(self) -> Session:
        """A copy to play a turn on: what a turn adds to is its own, the rest is shared."""
        trajectory = self.trajectory
        last = trajectory.segments[-1]
        own = msgspec.structs.replace(
            last,
            token_ids=list(last.token_ids),
            loss_mask=list(last.loss_mask),
            logprobs=list(last.logprobs),
            spans=list(last.spans),
        )
        return msgspec.structs.replace(
            self,
            trajectory=msgspec.structs.replace(
                trajectory,
                messages=list(trajectory.messages),
                segments=[*trajectory.segments[:-1], own],
                tool_calls=list(trajectory.tool_calls),
                artifacts=dict(trajectory.artifacts),
            ),
        )

    def adopt(self, draft: Session) -> None:
        """Become what the draft is."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(draft, name))
