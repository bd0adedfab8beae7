"""vLLM's weight-transfer engine for versions in an object store: it fetches by itself, and swaps when it is told.

`prepare` brings a shadow of the checkpoint to a target in a thread of its own, while vLLM goes on generating. The
update, which vLLM must be paused for, loads the groups that changed from the shadow into the model. It is one call:
who calls may die around it, and nothing is left half-done.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rl_core.delta import Reconciled, ShadowWeights, Target, reconcile
from rl_core.delta.fetch import SegmentSource
from rl_core.delta.priority import give_way
from rl_core.delta.shadow import Form, forms_of, refuse_another_form
from rl_core.delta.spool import SPOOL_BYTES
from rl_core.engines.progress import ProgressMeter
from rl_core.engines.protocol import Progress, TargetBody, UpdateStats
from rl_core.engines.sharing import SegmentSharing
from rl_core.engines.vllm.loading import load_groups, whole_groups
from rl_core.engines.vllm.messages import WorkerState
from rl_core.engines.vllm.twin import TwinModel
from rl_core.errors import EngineError, RequestRefused, RlCoreError, bare
from rl_core.models.checkpoint import count_bytes
from rl_core.store import ObjectStore, open_store

# vLLM shows what is logged below its own name.
log = logging.getLogger(f"vllm.{__name__}")


@dataclass
class StoreInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where versions are fetched from, and the folder whose weights vLLM started with.

    `spool` is a folder of fetched segments, of at most `spool_bytes`; `peer_token` is what replicas ask of each other.
    `update_threads` decode, and as many hash.
    """

    store: str
    folder: str
    spool: str | None = None
    spool_bytes: int = SPOOL_BYTES
    peer_token: str | None = None
    update_threads: int = 1


@dataclass
class SwapInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to swap to, which must be the one that is staged."""

    version: str


@dataclass(frozen=True, slots=True)
class _Staged:
    version: str
    done: Reconciled
    stage_s: float


class DeltaTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """One worker's shadow, and what of it is in the model. `prepare` and the swap never run at once."""

    init_info_cls = StoreInfo
    update_info_cls = SwapInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.version: str | None = None
        self.root = ""
        self.swaps = 0
        self.damaged = False
        self.state = WorkerState.IDLE
        self.target: str | None = None
        self.error: RlCoreError | None = None
        self.meter: ProgressMeter | None = None
        self.update: UpdateStats | None = None
        self._threads = 1
        self._store: ObjectStore | None = None
        self._sharing: SegmentSharing | None = None
        self._shadow: ShadowWeights | None = None
        self._staged: _Staged | None = None
        # What the shadow has and the model has not: a swap that fails leaves it to the next.
        self._dirty: set[str] = set()
        self.twin: TwinModel | None = None
        self._twin_dirty: set[str] = set()
        self._forms: dict[str, Form] = {}
        self._thread: threading.Thread | None = None

    @property
    def shadow_bytes(self) -> int:
        """Bytes of the shadow's tensors."""
        return count_bytes(self._shadow.tensors) if self._shadow else 0

    @property
    def progress(self) -> Progress | None:
        """How far the target is that is worked on."""
        return self.meter.now if self.meter and self.state is WorkerState.PREPARING else None

    @property
    def poisoned(self) -> bool:
        """Whether the shadow's memory was found to be other than what was written there."""
        return self._shadow is not None and self._shadow.damaged

    def init_transfer_engine(self, init_info: StoreInfo) -> None:
        """Read the shadow from the folder, once; a sidecar that was started again finds it as it was.

        Raises: ModelError, SpecError.
        """
        self._threads = init_info.update_threads
        if self._shadow is not None:
            return
        started = time.perf_counter()
        self._store = open_store(init_info.store)
        if init_info.spool is not None:
            # A folder is one process's: each rank is one.
            folder = Path(init_info.spool) / f"rank-{self.parallel_config.rank}"
            self._sharing = SegmentSharing(folder, max_bytes=init_info.spool_bytes, peer_token=init_info.peer_token)
        self._shadow = ShadowWeights.from_checkpoint(Path(init_info.folder), threads=self._threads)
        self.root = self._shadow.root
        self._forms = forms_of(self._shadow.tensors)
        log.info(
            "shadow_read bytes=%d tensors=%d root=%s seconds=%.3f",
            self.shadow_bytes, len(self._shadow.tensors), self.root[:16], time.perf_counter() - started,
        )  # fmt: skip

    def prepare(self, target: TargetBody) -> None:
        """Bring the shadow to a target in the background; `state` says how far. Raises: EngineError."""
        if self._shadow is None or self._store is None:
            self.give_up(RequestRefused("the worker has no store; start the sidecar with one"), target.version)
            return
        if self.state is WorkerState.PREPARING:
            raise EngineError("the worker is still at the target before; wait for it")
        self.state, self.target, self.error, self._staged = WorkerState.PREPARING, target.version, None, None
        self.meter = ProgressMeter()
        self._thread = threading.Thread(
            target=self._prepare, args=(self._store, self._shadow, target), name="prepare-weights", daemon=True
        )
        self._thread.start()

    def give_up(self, error: RlCoreError, what: str) -> None:
        """Say by `error` and `state` why `what`, a version or the attaching, came to nothing."""
        log.warning("given_up what=%s code=%s error=%s", what, error.code, error)
        self.error, self.state = bare(error), WorkerState.FAILED

    def start_weight_update(self) -> None:
        """Nothing to do: a swap is one call."""

    def receive_weights(self, update_info: SwapInfo) -> None:
        """Have what is staged generate; `version`, `damaged` and `error` say whether it does. vLLM must be paused.

        Nothing is raised: when one worker raises, vLLM leaves the answers of others unread, and takes them for those
        to its next call.
        """
        try:
            self._swap(update_info.version)
        except RlCoreError as error:
            self.give_up(error, update_info.version)
        except Exception as error:
            log.exception("swap_fault version=%s", update_info.version)
            self.give_up(EngineError(f"the swap failed: {type(error).__name__}: {error}"), update_info.version)

    def finish_weight_update(self) -> None:
        """Nothing to do: a swap is one call."""

    def shutdown(self) -> None:
        """Nothing to release: a target under way ends with the process."""

    def _swap(self, version: str) -> None:
        """Raises: RequestRefused; EngineError: the model is `damaged` then, if that is set."""
        staged, shadow = self._staged, self._shadow
        if staged is None and self.version == version and not self.damaged:
            return  # done already; another worker of this vLLM was not
        if staged is None or shadow is None or staged.version != version:
            raise RequestRefused(f"{version} is not staged; prepare it first")
        started = time.perf_counter()
        if self.twin is None:
            self._load(shadow, version)
        elif self._dirty:
            self.twin.flip()
            self.model = self._default_model = self.twin.serving
            # The twin has what this model lacked; now it is the twin that lacks it.
            self._dirty, self._twin_dirty = self._twin_dirty, self._dirty
            self.swaps += 1
        self._note(staged, swap_s=time.perf_counter() - started)

    def _load(self, shadow: ShadowWeights, version: str) -> None:
        """Load what changed into the model that generates. Raises: EngineError: it is `damaged` then."""
        # A model that is damaged has parts of unknown versions: everything goes in again.
        names = whole_groups(shadow.tensors, shadow.tensors if self.damaged else self._dirty)
        if not names:
            return
        self.damaged = True
        try:
            load_groups(self.model, self.model_config, shadow.tensors, names)
        except Exception as error:
            raise EngineError(
                f"{version} did not go into the model: {type(error).__name__}: {error}; the model holds a part of it "
                "and must not generate"
            ) from error
        self.damaged = False
        self._dirty.clear()
        self.swaps += 1

    def _load_twin(self, shadow: ShadowWeights) -> float:
        """Load what the twin lacks, where there is one; seconds. What breaks off here never generated."""
        if self.twin is None:
            return 0.0
        started = time.perf_counter()
        names = whole_groups(shadow.tensors, self._twin_dirty)
        self._twin_dirty = set(shadow.tensors)  # until all is in
        if names:
            with set_current_vllm_config(self.vllm_config):
                load_groups(self.twin.model, self.model_config, shadow.tensors, names)
        self._twin_dirty = set()
        return time.perf_counter() - started

    def _note(self, staged: _Staged, *, swap_s: float) -> None:
        done = staged.done
        self.version, self.root = staged.version, done.root
        self.update = UpdateStats(
            bytes_fetched=done.bytes_fetched, bytes_from_peers=done.bytes_from_peers, hops=len(done.hops),
            fetch_s=done.fetch_s, store_s=done.store_s, decode_s=done.decode_s, verify_s=done.verify_s,
            stage_s=staged.stage_s, pause_s=0.0, changed_tensors=len(done.changed),
        )  # fmt: skip
        self._staged, self.state, self.error = None, WorkerState.IDLE, None
        log.info(
            "swapped version=%s changed=%d stage_s=%.4f swap_s=%.4f",
            staged.version, len(done.changed), staged.stage_s, swap_s,
        )  # fmt: skip

    def _prepare(self, store: ObjectStore, shadow: ShadowWeights, target: TargetBody) -> None:
        wanted = Target(
            version=target.version, root=target.root, manifest=target.manifest, snapshot=target.snapshot,
            deltas=tuple(target.deltas),
        )  # fmt: skip
        assert self.meter is not None
        plain = nullcontext(SegmentSource(store, limit_bytes_s=target.limit_bytes_s))
        try:
            give_way()
            if target.repair:
                shadow.doubt()
            with self._sharing.source(store, target) if self._sharing is not None else plain as source:
                done = reconcile(
                    store, shadow, wanted, source=source, on_progress=self.meter.tell, threads=self._threads
                )
            self._dirty |= set(done.changed)
            self._twin_dirty |= set(done.changed)
            refuse_another_form(target.version, shadow.tensors, serving=self._forms)
            stage_s = self._load_twin(shadow)
        except RlCoreError as error:
            self.give_up(error, target.version)
        except Exception as error:
            log.exception("prepare_fault version=%s", target.version)
            self.give_up(EngineError(f"the update failed: {type(error).__name__}: {error}"), target.version)
        else:
            self._staged = _Staged(target.version, done, stage_s)
            self.state = WorkerState.STAGED
