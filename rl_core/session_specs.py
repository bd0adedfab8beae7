"""How sessions are sampled, cut off, and go on past their context window: the part of a spec that harnesses read."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rl_core.errors import SpecError
from rl_core.types import SamplingParams


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all specs."""

    def _require(self, ok: bool, message: str) -> None:
        if not ok:
            raise SpecError(message)


class CompactionKind(StrEnum):
    """What a session does when its context window is full."""

    NONE = "none"  # it is truncated
    SUMMARISE = "summarise"  # the policy writes a summary and begins again with it
    DROP_TOOL_RESULTS = "drop_tool_results"  # it begins again without the oldest results


SUMMARY_REQUEST = (
    "Your context is full. Write down all that you need to go on: what you found out, what you did, what is left. "
    "You will keep the task and this text, nothing else. Reply with the text alone."
)


class CompactionSpec(Spec, frozen=True, kw_only=True):
    """How a session goes on past its context window. `summary_tokens` is the most that a summary may have."""

    kind: CompactionKind = CompactionKind.NONE
    summary_tokens: int = 256
    request: str = SUMMARY_REQUEST

    def __post_init__(self) -> None:
        self._require(self.summary_tokens >= 8, f"summary_tokens must be at least 8, not {self.summary_tokens}")
        self._require(0 < len(self.request) <= 4000, "request must have 1 to 4000 characters")


class Limits(Spec, frozen=True, kw_only=True):
    """Where a session is cut off. 0 is no bound, for `max_sampled_tokens` (over the turns' own) and `max_wall_s`.

    `max_wall_s` counts what the session's turns took, generation and tools; not the time it lay stored.
    """

    max_turns: int = 2
    max_context_tokens: int = 1024
    max_sampled_tokens: int = 0
    max_wall_s: float = 0.0
    max_parallel_calls: int = 1
    compaction: CompactionSpec = CompactionSpec()


class SessionsSpec(Limits, frozen=True, kw_only=True):
    """How sessions of simulated tasks are sampled and where they are cut off."""

    sampling: SamplingParams = SamplingParams(max_tokens=20)

    @property
    def limits(self) -> Limits:
        """Where they are cut off, by itself."""
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})

    @property
    def most_sampled_tokens(self) -> int:
        """The most tokens that one attempt may sample: its turns, and a summary between any two of them."""
        most = self.sampling.max_tokens * self.max_turns
        if self.compaction.kind is CompactionKind.SUMMARISE:
            most += self.compaction.summary_tokens * (self.max_turns - 1)
        return min(most, self.max_sampled_tokens) if self.max_sampled_tokens else most

    def check_sessions(self) -> None:
        """Raises: SpecError."""
        for name in ("max_turns", "max_parallel_calls"):
            self._require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_sampled_tokens", "max_wall_s"):
            self._require(getattr(self, name) >= 0, f"{name} must be 0 (off) or positive, not {getattr(self, name)}")
        self._require(self.max_context_tokens >= 64, "max_context_tokens must be at least 64")
        self._require(
            self.compaction.kind is not CompactionKind.SUMMARISE
            or self.compaction.summary_tokens * 4 <= self.max_context_tokens,
            "compaction.summary_tokens must be at most a quarter of max_context_tokens",
        )
        self._require(
            self.sampling.trainable, "sampling for training must be untruncated: temperature > 0, top_p 1, top_k 0"
        )
