"""Reads for the pages: one trajectory, message by message and token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import exp

from django.conf import settings

from controlplane.models import ModelCard, Rollout
from rl_core.chat import ChatTokenizer
from rl_core.errors import DigestMismatch, ModelError, ObjectMissing, StoreError, TrajectoryError
from rl_core.store import ObjectStore, open_store
from rl_core.types import Message, TokenSegment, ToolCall, Trajectory

MAX_TOKENS = 6000
# Upper bounds of -logprob for the shades: a token of probability 0.9, 0.5, 0.1, 0.01, less.
_SHADES = (0.105, 0.693, 2.303, 4.605)


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token. `shade` 0 to 4 rises with surprise; `version` counts the trajectory's versions from 0."""

    position: int
    token_id: int
    text: str
    sampled: bool
    logprob: float
    shade: int
    version: int
    version_name: str
    starts_span: bool

    @property
    def probability(self) -> float:
        """The probability with which the token was sampled."""
        return exp(self.logprob)


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One context window with its tokens; `left_out` of them are beyond what a page shows."""

    tokens: list[TokenView]
    temperature: float
    sampled: int
    mean_logprob: float | None
    left_out: int


@dataclass(slots=True)
class MessageView:
    """One message of the graph, with what the tools said about it."""

    index: int
    role: str
    name: str
    content: str
    depth: int
    tokens: int
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """What the page shows; `problem` says why there is nothing, where there is nothing."""

    messages: list[MessageView] = field(default_factory=list)
    segments: list[SegmentView] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    artifacts: list[tuple[str, str]] = field(default_factory=list)
    problem: str = ""
    tokens_known: bool = True


@lru_cache(maxsize=1)
def _store() -> ObjectStore:
    return open_store(settings.STORE_URL)


@lru_cache(maxsize=8)
def _read_token_strings(folder: str) -> tuple[str, ...]:
    return tuple(ChatTokenizer.load(folder).token_strings)


def _token_strings(folder: str) -> tuple[str, ...]:
    """The text of each token id of a model; empty while the model is not on this machine."""
    try:
        return _read_token_strings(folder)
    except ModelError:
        return ()


def trajectory_view(rollout: Rollout) -> TrajectoryView:
    """The rollout's trajectory for its page. Never raises: what is missing is said."""
    if not rollout.trajectory_key:
        return TrajectoryView(problem="Nothing was written yet: the trajectory is stored after the first turn.")
    try:
        trajectory = Trajectory.from_bytes(_store().read(rollout.trajectory_key))
    except ObjectMissing:
        return TrajectoryView(problem=f"The store has no object {rollout.trajectory_key}; it was collected or moved.")
    except (StoreError, DigestMismatch, TrajectoryError) as error:
        return TrajectoryView(problem=f"The trajectory cannot be read: {error}")
    model = _model_of(rollout)
    strings = _token_strings(model.folder) if model else ()
    versions = trajectory.versions()
    return TrajectoryView(
        messages=_messages(trajectory),
        segments=[_segment(segment, versions, strings) for segment in trajectory.segments],
        versions=[_short_version(version) for version in versions],
        tool_calls=trajectory.tool_calls,
        artifacts=sorted(trajectory.artifacts.items()),
        tokens_known=bool(strings),
    )


def _model_of(rollout: Rollout) -> ModelCard | None:
    return rollout.group.admitted_version.lineage.model


def _short_version(text: str) -> str:
    """Epoch and number: within one trajectory the lineage is the same nearly always."""
    return text.rpartition(":")[2]


def _messages(trajectory: Trajectory) -> list[MessageView]:
    """The graph in order; a message is indented where it branches off, not where it only follows."""
    depths: list[int] = []
    children: dict[int, int] = {}
    views: list[MessageView] = []
    turn = 0
    for index, message in enumerate(trajectory.messages):
        seen = children.get(message.parent, 0)
        children[message.parent] = seen + 1
        base = depths[message.parent] if 0 <= message.parent < index else 0
        depths.append(base + (1 if seen and message.parent >= 0 else 0))
        view = _message(index, message, depths[index])
        if message.role == "assistant":
            view.calls = [call for call in trajectory.tool_calls if call.turn == turn]
            turn += 1
        views.append(view)
    return views


def _message(index: int, message: Message, depth: int) -> MessageView:
    return MessageView(
        index=index,
        role=message.role.value,
        name=message.name,
        content=message.content,
        depth=depth,
        tokens=max(0, message.end - message.start),
    )


def _segment(segment: TokenSegment, versions: list[str], strings: tuple[str, ...]) -> SegmentView:
    version_at: dict[int, str] = {}
    starts = set()
    for span in segment.spans:
        starts.add(span.start)
        version_at.update(dict.fromkeys(range(span.start, span.end), span.version))
    shown = min(len(segment.token_ids), MAX_TOKENS)
    tokens = [
        _token(segment, position, version_at.get(position, ""), versions, strings, starts_span=position in starts)
        for position in range(shown)
    ]
    sampled = [logprob for logprob, mask in zip(segment.logprobs, segment.loss_mask, strict=True) if mask]
    return SegmentView(
        tokens=tokens,
        temperature=segment.sampling.temperature,
        sampled=len(sampled),
        mean_logprob=sum(sampled) / len(sampled) if sampled else None,
        left_out=len(segment.token_ids) - shown,
    )


def _token(
    segment: TokenSegment,
    position: int,
    version: str,
    versions: list[str],
    strings: tuple[str, ...],
    *,
    starts_span: bool,
) -> TokenView:
    token_id = segment.token_ids[position]
    logprob = segment.logprobs[position]
    return TokenView(
        position=position,
        token_id=token_id,
        text=strings[token_id] if 0 <= token_id < len(strings) else f"⟨{token_id}⟩",
        sampled=bool(segment.loss_mask[position]),
        logprob=logprob,
        shade=sum(-logprob > bound for bound in _SHADES),
        version=versions.index(version) if version in versions else 0,
        version_name=_short_version(version),
        starts_span=starts_span,
    )
