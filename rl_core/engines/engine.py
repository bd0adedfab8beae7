"""The embedded engine: named weight slots over one model, each with weights, cache and scheduler of its own.

A slot's weights change in two moves. `stage` prepares them beside the running ones, on the caller's thread; `commit`
flips between two decode steps. Slots share every tensor in which they do not differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rl_core.engines.config import ModelConfig
from rl_core.engines.linear import choose_dtype
from rl_core.engines.precedence import Precedence
from rl_core.engines.protocol import ComputeDtype
from rl_core.engines.request import ActiveSequence, OnToken, Request, TextCodec
from rl_core.engines.scheduler import Scheduler, SchedulerLimits
from rl_core.engines.weights import WeightSet
from rl_core.errors import RequestRefused
from rl_core.models.checkpoint import read_checkpoint, read_config
from rl_core.types import KvMode, PauseMode, VersionRef

DEFAULT_SLOT: Final = "default"


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that are ready to be committed to `slot`."""

    slot: str
    weights: WeightSet
    changed_tensors: int
    stage_s: float


class Engine:
    """Generates tokens. Thread-safe; `close` ends its threads."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        codec: TextCodec,
        limits: SchedulerLimits | None = None,
        dtype: ComputeDtype = ComputeDtype.AUTO,
        slots: Sequence[str] = (DEFAULT_SLOT,),
    ) -> None:
        """Raises: ModelError when the tensors do not fit the config."""
        self.config = config
        self.codec = codec
        self._born = time.monotonic()
        stored = tensors["model.embed_tokens.weight"].dtype if "model.embed_tokens.weight" in tensors else torch.float32
        weights = WeightSet.build(config, tensors, dtype=choose_dtype(dtype, stored))
        self.dtype = weights.dtype
        limits = limits or SchedulerLimits()
        precedence = Precedence()
        self._slots = {
            name: Scheduler(name, weights, codec=codec, limits=limits, precedence=precedence) for name in slots
        }

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        codec: TextCodec,
        limits: SchedulerLimits | None = None,
        dtype: ComputeDtype = ComputeDtype.AUTO,
        slots: Sequence[str] = (DEFAULT_SLOT,),
    ) -> Engine:
        """An engine on a Hugging Face model folder. Raises: ModelError."""
        config = ModelConfig.from_dict(read_config(folder))
        return cls(config, read_checkpoint(folder), codec=codec, limits=limits, dtype=dtype, slots=slots)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the weight slots; requests that name none go to the first."""
        return tuple(self._slots)

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was made."""
        return time.monotonic() - self._born

    @property
    def max_len(self) -> int:
        """The longest sequence, prompt and completion together."""
        return self._scheduler(None).max_len

    def submit(self, request: Request, *, slot: str | None = None, on_token: OnToken | None = None) -> ActiveSequence:
        """Queue a request. Raises: RequestRefused, VersionUnavailable, EngineBusy."""
        return self._scheduler(slot).submit(request, on_token)

    def abort(self, sequence: ActiveSequence, *, slot: str | None = None) -> None:
        """End a request with what it has."""
        self._scheduler(slot).abort(sequence)

    def stage(self, changed: Mapping[str, Tensor], *, slot: str | None = None) -> Staged:
        """Prepare the slot's weights with `changed` replaced. Runs on the caller's thread. Raises: ModelError."""
        scheduler = self._scheduler(slot)
        started = time.perf_counter()
        with torch.inference_mode():
            weights = scheduler.weights.derive(changed)
        return Staged(scheduler.name, weights, len(changed), time.perf_counter() - started)

    def update_begins(self, *, slot: str | None = None) -> None:
        """An update of the slot is being prepared: from now on its gauges watch what decoding feels of it."""
        self._scheduler(slot).gauges.update_begins()

    def commit(self, staged: Staged, *, version: VersionRef | None, kv: KvMode = KvMode.KEEP) -> float:
        """Flip to staged weights between two decode steps; seconds the flip took."""
        scheduler = self._scheduler(staged.slot)
        before = scheduler.weights  # held here, so that freeing them is not the decode thread's work
        pause_s = scheduler.commit(staged.weights, version=version, kv=kv)
        del before
        return pause_s

    def relabel(self, version: VersionRef | None, *, slot: str | None = None) -> None:
        """Give the weights that serve now the name of a version that has the same root."""
        self._scheduler(slot).commit(None, version=version, kv=KvMode.KEEP)

    def version(self, slot: str | None = None) -> VersionRef | None:
        """The version that serves now, if it has a name."""
        return self._scheduler(slot).version

    def tensors(self, slot: str | None = None) -> Mapping[str, Tensor]:
        """The checkpoint's tensors that serve now, by checkpoint name. Never written to: copy before changing."""
        return self._scheduler(slot).weights.tensors

    def pause(self, mode: PauseMode) -> None:
        """Pause every slot."""
        for scheduler in self._slots.values():
            scheduler.pause(mode)

    def resume(self) -> None:
        """Resume every slot."""
        for scheduler in self._slots.values():
            scheduler.resume()

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Numbers by slot."""
        return {name: scheduler.snapshot() for name, scheduler in self._slots.items()}

    def close(self) -> None:
        """Abort what is in flight and end the threads."""
        for scheduler in self._slots.values():
            scheduler.close()

    def _scheduler(self, slot: str | None) -> Scheduler:
        if slot is None:
            return next(iter(self._slots.values()))
        scheduler = self._slots.get(slot)
        if scheduler is None:
            raise RequestRefused(f"there is no weight slot {slot!r}; this engine has {', '.join(self._slots)}")
        return scheduler
