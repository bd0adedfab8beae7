"""What the sidecar and vLLM's workers say to each other, as JSON over vLLM's own calls. Imports no torch."""

from __future__ import annotations

import re
import uuid
from enum import StrEnum
from typing import Final

import msgspec

from rl_core.engines.protocol import Progress, UpdateStats

BACKEND: Final = "slipway"  # the name of the weight-transfer engine
WORKER_EXTENSION: Final = "rl_core.engines.vllm.worker.DeltaWorkerExtension"
# Requests whose id begins so have their routed experts kept for the sidecar to fetch.
ROUTES_PREFIX: Final = "routes-"
_TICKET: Final = re.compile(r"[0-9a-f]{32}")


def new_ticket() -> str:
    """An id for a request of the sidecar's."""
    return uuid.uuid4().hex


def ticket_in(identity: str) -> str | None:
    """The sidecar's id within vLLM's own, which adds to it before and after; None for somebody else's request."""
    found = _TICKET.search(identity)
    return found.group() if found else None


class TransferSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where workers fetch versions from, and the folder whose weights vLLM started with.

    `spool` is a folder of fetched segments, of at most `spool_bytes`; `peer_token` is what replicas ask of each other.
    In each worker `update_threads` decode, and as many hash.
    """

    store: str
    folder: str
    spool: str | None = None
    spool_bytes: int = 0
    peer_token: str | None = None
    update_threads: int = 1


class WorkerState(StrEnum):
    """Where a worker's shadow stands with the target it was given last."""

    IDLE = "idle"  # no target since the last swap
    PREPARING = "preparing"  # fetching, decoding, verifying; vLLM goes on generating
    STAGED = "staged"  # the shadow is the target, verified; the model is not yet
    FAILED = "failed"  # the target was given up; `error` says why


class RoutesSource(StrEnum):
    """Who keeps routed experts."""

    NONE = "none"  # a dense model, or nobody asked for them
    VLLM = "vllm"  # vLLM's own flag; they come with the answer
    RECORDER = "recorder"  # ours, in the worker; they are fetched after the answer


class WorkerStatus(msgspec.Struct, kw_only=True):
    """One worker. `version` and `root` are those of the weights in the model; `swaps` counts their changes.

    `attached`: it reads versions, where it was told from where, and meters its steps; `error` says why not.
    `updating`: an update was begun in vLLM and not ended.
    `damaged`: the model holds a part of an update and must not generate. `poisoned`: the shadow is not what its root
    names. Sizes in bytes, times in seconds.
    """

    version: str | None
    root: str
    state: WorkerState
    swaps: int
    attached: bool
    updating: bool
    damaged: bool
    poisoned: bool
    shadow_bytes: int
    prefix_caching: bool
    routes: RoutesSource
    target: str | None = None
    error: str | None = None
    error_code: str | None = None
    error_retryable: bool = False
    progress: Progress | None = None
    update: UpdateStats | None = None
    decode_steps_total: int = 0
    decode_step_median_s: float = 0.0
    decode_step_max_s: float = 0.0
    busy_s_total: float = 0.0


class WorkerRoutes(msgspec.Struct, kw_only=True):
    """Routed experts of one request; `data` is base64 of C-ordered `[tokens, layers, top_k]`."""

    tokens: int
    layers: int
    top_k: int
    dtype: str
    data: str
