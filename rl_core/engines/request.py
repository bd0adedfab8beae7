"""Requests to the engine, and the state of a sequence on its way through the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rl_core.engines.sampling import Draw, Sampled
from rl_core.engines.stops import StopMatcher
from rl_core.types import FinishReason, Generated, Routes, SamplingParams, VersionRef, VersionSpan


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        ...

    @property
    def token_strings(self) -> list[str]:
        """The text of each token id."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, special ones left out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to generate, token in and token out."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    min_version: VersionRef | None = None
    exact_version: VersionRef | None = None
    routes: bool = False
    tops: int = 0
    background: bool = False

    def accepts(self, version: VersionRef | None) -> bool:
        """Whether tokens of `version` may answer this request."""
        if version is None:
            return self.min_version is None and self.exact_version is None
        return version.satisfies(min_version=self.min_version, exact_version=self.exact_version)


OnToken = Callable[[Sampled], None]


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """A request in the scheduler. `tokens` ends with the token that has not been fed yet."""

    request: Request
    serial: int
    limit: int
    matcher: StopMatcher
    on_token: OnToken | None
    future: Future[Generated] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    results: list[Sampled] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cached: int = -1
    aborted: bool = False
    kept_routes: NDArray[np.unsignedinteger[Any]] | None = None
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        seed = self.request.sampling.seed
        self._random = random.Random(seed)

    @property
    def sampled(self) -> int:
        """How many tokens have been sampled."""
        return len(self.results)

    def draw(self) -> Draw:
        """How the next token is drawn. Takes one number from the request's own generator."""
        params = self.request.sampling
        return Draw(params.temperature, params.top_p, params.top_k, self._random.random(), self.request.tops)

    def push(self, result: Sampled, version: str, eos_ids: frozenset[int]) -> FinishReason | None:
        """Take a sampled token; the reason when it was the last."""
        place = self.sampled
        self.tokens.append(result.token)
        self.results.append(result)
        last = self.spans[-1] if self.spans else None
        if last is not None and last.version == version:
            self.spans[-1] = VersionSpan(last.start, place + 1, version)
        else:
            self.spans.append(VersionSpan(place, place + 1, version))
        if result.token in eos_ids or self.matcher.push(result.token):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.sampled >= self.limit else None

    def keep_routes(self, routes: NDArray[np.unsignedinteger[Any]]) -> None:
        """Hold on to routes before their row is computed again: the recorded logprobs belong to these."""
        kept = 0 if self.kept_routes is None else len(self.kept_routes)
        if len(routes) > kept:
            self.kept_routes = routes.copy() if not kept else np.concatenate((self.kept_routes, routes[kept:]))  # type: ignore[arg-type]

    def result(self, reason: FinishReason, codec: TextCodec) -> Generated:
        """What the client gets."""
        prompt = len(self.request.prompt)
        output = self.tokens[prompt:]
        return Generated(
            token_ids=output,
            logprobs=[one.logprob for one in self.results],
            text=codec.decode(output),
            finish_reason=reason,
            spans=self.spans,
            prompt_tokens=prompt,
            cached_tokens=max(self.cached, 0),
            routes=self._routes() if self.request.routes else None,
        )

    def _routes(self) -> Routes | None:
        kept = self.kept_routes
        if kept is None or kept.shape[2] == 0:
            return None
        tokens, layers, top_k = kept.shape
        name = "uint8" if kept.dtype.itemsize == 1 else "uint16"
        return Routes(tokens, layers, top_k, name, kept.tobytes())
