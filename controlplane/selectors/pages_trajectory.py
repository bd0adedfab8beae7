"""Reads for the pages: one trajectory, message by message and token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import exp

from django.conf import settings

from controlplane.models import ModelCard, Rollout
from controlplane.selectors.pages_conversation import MessageView, conversation
from rl_core.chat import ChatTokenizer
from rl_core.errors import DigestMismatch, ModelError, ObjectMissing, StoreError, TrajectoryError
from rl_core.store import ObjectStore, open_store
from rl_core.types import TokenSegment, ToolCall, Trajectory

MAX_TOKENS = 12_000
MAX_ARTIFACT_CHARACTERS = 20_000
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


@dataclass(frozen=True, slots=True)
class ArtifactView:
    """What the session handed to graders; `left_out` characters of it are beyond what a page shows."""

    name: str
    content: str
    left_out: int


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """What the page shows; `problem` says why there is nothing, where there is nothing."""

    messages: list[MessageView] = field(default_factory=list)
    segments: list[SegmentView] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    artifacts: list[ArtifactView] = field(default_factory=list)
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
        messages=conversation(trajectory),
        segments=_segments(trajectory, versions, strings),
        versions=[_short_version(version) for version in versions],
        tool_calls=trajectory.tool_calls,
        artifacts=[_artifact(name, trajectory.artifacts[name]) for name in sorted(trajectory.artifacts)],
        tokens_known=bool(strings),
    )


def _model_of(rollout: Rollout) -> ModelCard | None:
    return rollout.group.admitted_version.lineage.model


def _short_version(text: str) -> str:
    """Epoch and number: within one trajectory the lineage is the same nearly always."""
    return text.rpartition(":")[2]


def _artifact(name: str, content: str) -> ArtifactView:
    return ArtifactView(name, content[:MAX_ARTIFACT_CHARACTERS], max(0, len(content) - MAX_ARTIFACT_CHARACTERS))


def _segments(trajectory: Trajectory, versions: list[str], strings: tuple[str, ...]) -> list[SegmentView]:
    """Every window; together they show no more tokens than a page can take."""
    views, left = [], MAX_TOKENS
    for segment in trajectory.segments:
        views.append(_segment(segment, versions, strings, most=left))
        left -= len(views[-1].tokens)
    return views


def _segment(segment: TokenSegment, versions: list[str], strings: tuple[str, ...], *, most: int) -> SegmentView:
    version_at: dict[int, str] = {}
    starts = set()
    for span in segment.spans:
        starts.add(span.start)
        version_at.update(dict.fromkeys(range(span.start, span.end), span.version))
    shown = min(len(segment.token_ids), most)
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
