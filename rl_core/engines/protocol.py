"""Bodies of the engine's HTTP protocol, as both sides read them. Imports no torch.

`/v1/chat/completions` and `/v1/completions` take OpenAI's fields; what the engine adds to them is `top_k`,
`min_version`, `exact_version`, `slot` and `return_token_ids`. Fields that it does not know are ignored, as OpenAI's
clients expect; known ones that it cannot honour are refused, never silently dropped.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Final

import msgspec

from rl_core.errors import SpecError
from rl_core.types import Generated, KvMode, PauseMode, SamplingParams, VersionRef

MSGPACK_TYPE: Final = "application/msgpack"
EVENTS_TYPE: Final = "text/event-stream"
MAX_CHOICES: Final = 64
MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
_HEX64: Final = re.compile(r"[0-9a-f]{64}")


class ComputeDtype(StrEnum):
    """What the engine computes in."""

    AUTO = "auto"  # the checkpoint's own where the CPU multiplies it natively, else float32
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class SlotState(StrEnum):
    """Where a weight slot stands with its target."""

    READY = "ready"  # it serves its version; `error` says whether a later target failed
    RECONCILING = "reconciling"  # a target is being fetched, decoded or staged
    POISONED = "poisoned"  # the copy that deltas apply to is damaged; the next target repairs it from a snapshot


class UpdatePhase(StrEnum):
    """What an update of a slot is at."""

    FETCH = "fetch"  # bytes arrive, and what has arrived is checked and decoded
    DECODE = "decode"  # everything is here
    VERIFY = "verify"  # the root of what came out
    STAGE = "stage"  # the engine prepares its own form of the weights


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/generate`: token in, token out. `session` names the caller's session in logs; reuse needs no hint.

    With `stream` the answer is server-sent events: one `TokenEvent` for each token, an `EndEvent` (or a `FaultEvent`),
    then `[DONE]`. `top_logprobs` likely alternatives come with each token of a stream. What is in the
    `background` gives way to what is not, in every slot of the engine: rollouts where users are answered too.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    min_version: str | None = None
    exact_version: str | None = None
    slot: str | None = None
    return_routes: bool = False
    session: str | None = None
    stream: bool = False
    top_logprobs: int = 0
    background: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise SpecError(f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}]")


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content; only text can be read."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.role not in ("system", "developer", "user", "assistant", "tool"):
            raise SpecError(f"unknown role {self.role!r}")
        if self.tool_calls:
            raise SpecError("tool_calls are not supported; write calls into the content")
        if isinstance(self.content, list) and any(part.type != "text" for part in self.content):
            raise SpecError("only text content is supported")

    def as_dict(self) -> dict[str, Any]:
        """The form that chat templates read."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        named = {"name": self.name} if self.name else {}
        return {"role": "system" if self.role == "developer" else self.role, "content": text, **named}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides tokens."""

    include_usage: bool = False


class OpenAiBody(msgspec.Struct, kw_only=True):
    """Fields that both of OpenAI's completion endpoints share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_version: str | None = None
    exact_version: str | None = None
    slot: str | None = None
    return_token_ids: bool = False

    def __post_init__(self) -> None:
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise SpecError(f"{name} is not supported; leave it out")
        if not 1 <= self.choices <= MAX_CHOICES:
            raise SpecError(f"n must be in [1, {MAX_CHOICES}], not {self.n}")
        if len(self.stops) > MAX_STOPS:
            raise SpecError(f"at most {MAX_STOPS} stop strings, not {len(self.stops)}")

    @property
    def choices(self) -> int:
        """How many completions are wanted."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, *, max_tokens: int, choice: int) -> SamplingParams:
        """How choice number `choice` is drawn. Raises: SpecError."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            max_tokens=max_tokens,
            stop=self.stops,
            seed=None if self.seed is None else self.seed + choice,
        )


class ChatBody(OpenAiBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        OpenAiBody.__post_init__(self)
        if not self.messages:
            raise SpecError("messages is empty")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise SpecError(f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}]")
        if self.tools:
            raise SpecError("tools are not supported; describe them in a message")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise SpecError("only the response_format of type text is supported")


class CompletionBody(OpenAiBody, kw_only=True):
    """`POST /v1/completions`: the prompt as text or as token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None

    def __post_init__(self) -> None:
        OpenAiBody.__post_init__(self)
        if self.echo or self.suffix:
            raise SpecError("echo and suffix are not supported; leave them out")
        if not 0 <= (self.logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise SpecError(f"logprobs must be in [0, {MAX_TOP_LOGPROBS}]")
        if len(self.prompts) * self.choices > MAX_CHOICES:
            raise SpecError(f"at most {MAX_CHOICES} completions a request")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the call, each as text or as token ids. Raises: SpecError for a mixture of ids and others."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        others = [one for one in self.prompt if not isinstance(one, int)]
        if ids and others:
            raise SpecError("prompt mixes token ids with texts or lists")
        return [ids] if ids or not others else others


class TargetBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /control/target`: the version that a slot shall serve.

    `deltas` are keys of further manifests that lead towards it (skip-deltas); the cheapest path by bytes is taken.
    `peers` are inference URLs of replicas of the same cluster that may hold segments already; nothing that they send
    is believed unchecked. `limit_bytes_s` bounds what the slot reads from the store a second.
    With `repair` nothing that the replica holds is believed: everything comes from a snapshot.
    """

    version: str
    root: str
    manifest: str
    snapshot: str | None = None
    deltas: list[str] = []
    peers: list[str] = []
    limit_bytes_s: float | None = None
    repair: bool = False
    slot: str | None = None
    kv: KvMode = KvMode.KEEP

    def __post_init__(self) -> None:
        VersionRef.parse(self.version)
        if self.limit_bytes_s is not None and not self.limit_bytes_s > 0:
            raise SpecError("limit_bytes_s must be more than 0; leave it out for no limit")


class SegmentRef(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A stored object of `size` bytes, whose blake3 is 64 hex digits."""

    key: str
    size: int
    blake3: str

    def __post_init__(self) -> None:
        if self.size <= 0 or not _HEX64.fullmatch(self.blake3):
            raise SpecError(f"segment {self.key} has a size below 1 or a blake3 that is not 64 hex digits")


class DraftRef(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What is known of a delta while it is published: its base's root, its codec, a digest of its tensors' forms."""

    base_root: str
    codec: str
    forms: str

    def __post_init__(self) -> None:
        if not _HEX64.fullmatch(self.base_root) or not _HEX64.fullmatch(self.forms):
            raise SpecError("a draft has a base_root or forms that are not 64 hex digits")


class StandingRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A segment that stands, with the frames in it as the manifest will say them; without them it is only fetched."""

    segment: SegmentRef
    frames: list[Any] = []
    draft: DraftRef | None = None


class AnnounceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /control/segments`: segments that stand of a version which the attempt with `fence` is publishing.

    The engine may bring them into its spool, and decode them beside what `slots` serve; nothing of them is served
    before a slot is given the version as its target. `peers` and `limit_bytes_s` are as in a target. `withdrawn`: the
    attempt will not commit, and what was brought may go.
    """

    version: str
    fence: int
    segments: list[StandingRef] = []
    slots: list[str] = []
    peers: list[str] = []
    limit_bytes_s: float | None = None
    withdrawn: bool = False

    def __post_init__(self) -> None:
        VersionRef.parse(self.version)
        if self.limit_bytes_s is not None and not self.limit_bytes_s > 0:
            raise SpecError("limit_bytes_s must be more than 0; leave it out for no limit")


class PauseBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /control/pause`."""

    mode: PauseMode = PauseMode.KEEP


class UpdateStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the last update of a slot took. `store_s` is what of `fetch_s` went to reading the store."""

    bytes_fetched: int
    bytes_from_peers: int = 0
    hops: int
    fetch_s: float
    store_s: float = 0.0
    decode_s: float
    verify_s: float
    stage_s: float
    pause_s: float
    changed_tensors: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far an update has come. Bytes are fetched ones of the whole path; `remaining_s` None: not known yet."""

    phase: UpdatePhase
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    remaining_s: float | None = None


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a slot serves, and where it stands with the target it was given last. `progress`: while it reconciles."""

    version: str | None
    root: str
    state: SlotState
    target: str | None = None
    error: str | None = None
    error_code: str | None = None
    update: UpdateStats | None = None
    progress: Progress | None = None


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /control/version`."""

    name: str
    slots: dict[str, SlotStatus]


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object. `retryable` is ours: whether the same call may succeed later."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retryable: bool = False


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is an error."""

    error: ErrorDetail


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="token", omit_defaults=True):
    """One sampled token. `version` is named with the first token that it sampled."""

    token: int
    logprob: float
    version: str = ""
    tops: list[tuple[int, float]] = []


class EndEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="end"):
    """The whole result, after its last token."""

    result: Generated


class FaultEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The generation broke off."""

    error: ErrorDetail


GenerateEvent = TokenEvent | EndEvent | FaultEvent


def parse_version(text: str | None) -> VersionRef | None:
    """A version bound of a request. Raises: SpecError."""
    return None if text is None else VersionRef.parse(text)
