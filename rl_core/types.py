"""The words of the library: enums and records that every part shares. Imports no torch and no numpy.

Axis legend, used as name suffixes everywhere: P prompts, G attempts per prompt (group), B sequences,
T tokens, V vocabulary, L layers, E experts, K routed experts per token (top-k), D hidden, H heads.
Units are suffixes too: `_s` seconds, `_bytes`, `_tokens`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Self

import msgspec

from rl_core.errors import SpecError, TrajectoryError


class StageKind(StrEnum):
    """What a stage of a run does."""

    RL = "rl"  # simulated RL on a task set
    REALTIME = "realtime"  # RL on a window of production generations and feedback


class Objective(StrEnum):
    """What a trajectory of a batch is trained by."""

    POLICY_GRADIENT = "policy_gradient"
    KTO = "kto"  # liked or not
    DPO = "dpo"  # rejected for what a person wrote instead


class ClusterRole(StrEnum):
    """What a cluster's replicas are for."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    SERVING = "serving"


class WeightFormat(StrEnum):
    """How a version's weights are written: as they were trained, or as derived from that for serving."""

    BF16 = "bf16"  # the published weights themselves
    FP8_CHANNEL = "fp8-channel"  # e4m3, one scale for each output channel
    FP8_BLOCK = "fp8-block"  # e4m3, one scale for each block of 128 x 128
    MXFP4 = "mxfp4"  # e2m1, a power of two for each 32 elements of a row
    NVFP4 = "nvfp4"  # e2m1, an e4m3 scale for each 16 elements of a row, and one for the tensor


class Split(StrEnum):
    """Which part of a task set a task belongs to."""

    TRAIN = "train"
    HELDOUT = "heldout"


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # the token limit
    ABORT = "abort"  # the client left, or the engine was told to


class Ending(StrEnum):
    """How a rollout ended, in Gymnasium's sense."""

    TERMINATED = "terminated"  # the episode came to its own end
    TRUNCATED = "truncated"  # a turn, token or time limit cut it off


class Fault(StrEnum):
    """Whose fault a failed rollout was. Only the policy's failures are trained on."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    INFRASTRUCTURE = "infrastructure"


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class CompactionMessage(StrEnum):
    """The names of messages by which a context window was summarised."""

    REQUEST = "summary_request"  # what the policy was asked
    SUMMARY = "summary"  # what it said
    RESTART = "restart"  # how the next window begins


class KvMode(StrEnum):
    """What a swap does to requests in flight."""

    KEEP = "keep"  # go on over the old keys and values
    RECOMPUTE = "recompute"  # prefill prompt and completion again with the new weights


class Profile(StrEnum):
    """What encoding a delta is to save."""

    SMALL = "small"  # bytes: for links between regions
    FAST = "fast"  # time: for links about as fast as memory


class PauseMode(StrEnum):
    """What a pause does to requests in flight."""

    KEEP = "keep"  # freeze them where they are
    WAIT = "wait"  # let them finish, admit nothing
    ABORT = "abort"  # end them with FinishReason.ABORT


_VERSION = re.compile(r"([A-Za-z0-9-]{1,64}):([0-9]{1,9})-([0-9]{1,9})")


class VersionRef(msgspec.Struct, frozen=True, order=True):
    """A policy version: `(lineage, epoch, number)`, ordered by epoch, then number, within a lineage.

    Its text form is `lineage:epoch-number`, e.g. `0192f0c4-…:0-12`.
    """

    lineage: str
    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}:{self.epoch}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form. Raises: SpecError."""
        match = _VERSION.fullmatch(text)
        if match is None:
            raise SpecError(f"not a policy version: {text!r}; expected lineage:epoch-number")
        return cls(match[1], int(match[2]), int(match[3]))

    def satisfies(self, *, min_version: VersionRef | None, exact_version: VersionRef | None) -> bool:
        """Whether a request that carries these bounds may be answered with this version."""
        if exact_version is not None and self != exact_version:
            return False
        if min_version is None:
            return True
        return self.lineage == min_version.lineage and self >= min_version


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave the distribution whole."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 10.0:
            raise SpecError(f"temperature must be in [0, 10], not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise SpecError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise SpecError(f"top_k must be 0 (off) or positive, not {self.top_k}")
        if self.max_tokens < 1:
            raise SpecError(f"max_tokens must be at least 1, not {self.max_tokens}")

    @property
    def trainable(self) -> bool:
        """Whether tokens drawn so may enter a policy gradient: sampled, and from the whole distribution."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` that one policy version produced. Offsets are the containing sequence's."""

    start: int
    end: int
    version: str


class Routes(msgspec.Struct, frozen=True):
    """Routed experts of `tokens` consecutive tokens, C-ordered uint8 or little-endian uint16 `[T, L, K]`.

    Rows beyond what the engine computed (the last sampled token is never fed back) are absent: `tokens` may be
    one less than the sequence's length.
    """

    tokens: int
    layers: int
    top_k: int
    dtype: str
    data: bytes


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the message graph. `parent` is an index into the trajectory's messages, -1 for a root.

    `name` is the tool's whose result it is, or a CompactionMessage. Its tokens stand at `[start, end)` of a segment; -1
    is none: an opening stands before the first turn, and a result without a segment was never read.
    """

    role: Role
    content: str
    parent: int = -1
    name: str = ""
    segment: int = -1
    start: int = 0
    end: int = 0


class TokenSegment(msgspec.Struct, kw_only=True):
    """One context window: a token sequence to train on. All lists have length T.

    `loss_mask` is 1 on sampled tokens, 0 on prompt, tool results and template. `logprobs` holds the behaviour
    logprob (natural log, of the distribution actually sampled from) where the mask is 1, 0.0 elsewhere. `spans`
    cover exactly the masked-in tokens. `sampling` applies to the whole segment.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    sampling: SamplingParams
    routes: Routes | None = None

    def validate(self) -> None:
        """Raises: TrajectoryError when lengths disagree or spans do not cover the sampled tokens."""
        n = len(self.token_ids)
        if len(self.loss_mask) != n or len(self.logprobs) != n:
            raise TrajectoryError(
                f"segment of {n} tokens has {len(self.loss_mask)} mask entries and {len(self.logprobs)} logprobs"
            )
        covered = [0] * n
        for span in self.spans:
            if not 0 <= span.start < span.end <= n:
                raise TrajectoryError(f"version span [{span.start}, {span.end}) leaves the segment of {n} tokens")
            for position in range(span.start, span.end):
                covered[position] += 1
        if covered != self.loss_mask:
            raise TrajectoryError("version spans must cover the sampled tokens once each, and nothing else")


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, as the harness saw it."""

    tool: str
    arguments: str
    result: str
    ok: bool
    turn: int


class Trajectory(msgspec.Struct, kw_only=True):
    """A whole rollout: what was said, what was sampled, how it ended. `format` guards old blobs.

    `reported` are the scores, each in [0, 1], that a remote environment gave.
    """

    task_id: str
    messages: list[Message]
    segments: list[TokenSegment]
    tool_calls: list[ToolCall] = []
    ending: Ending | None = None
    artifacts: dict[str, str] = {}
    reported: dict[str, float] = {}
    format: int = 1

    def validate(self) -> None:
        """Raises: TrajectoryError."""
        if self.format != 1:
            raise TrajectoryError(f"trajectory format {self.format} is not known to this build; upgrade Slipway")
        for segment in self.segments:
            segment.validate()
        for index, message in enumerate(self.messages):
            if message.parent >= index:
                raise TrajectoryError(f"message {index} names a later parent {message.parent}")

    def versions(self) -> list[str]:
        """Every policy version that sampled a token, in order of first use."""
        return list(dict.fromkeys(span.version for segment in self.segments for span in segment.spans))

    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(sum(segment.loss_mask) for segment in self.segments)

    def to_bytes(self) -> bytes:
        """Encode as MessagePack, deterministic for equal trajectories."""
        self.validate()
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Trajectory:
        """Decode and validate. Raises: TrajectoryError."""
        try:
            trajectory = msgspec.msgpack.decode(blob, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TrajectoryError(f"not a trajectory blob: {error}") from error
        trajectory.validate()
        return trajectory


class Generated(msgspec.Struct, kw_only=True):
    """What an engine returns for one request, token in, token out.

    `token_ids` and `logprobs` have length T (sampled tokens; the stop token included when one ended it).
    `spans` offsets count sampled tokens from 0. `routes` cover prompt and sampled tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: FinishReason
    spans: list[VersionSpan]
    prompt_tokens: int
    cached_tokens: int = 0
    routes: Routes | None = None
