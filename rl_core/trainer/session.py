"""One run in a trainer process: checks what a request expects, reads rollouts, steps, publishes, checkpoints."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from rl_core.delta import Base, Published, publish_delta, weights_root
from rl_core.errors import BaseMismatch, SpecError, TrainerError, TrainerLost
from rl_core.specs import Stage
from rl_core.store import ObjectStore, open_store
from rl_core.trainer.batch import TrainRollout
from rl_core.trainer.checkpoint import load_checkpoint, save_checkpoint
from rl_core.trainer.gradient import Progress
from rl_core.trainer.memory import peak_mb, release_freed
from rl_core.trainer.messages import OpenRequest, Position, StepMetrics, StepRequest
from rl_core.trainer.trainer import Trainer
from rl_core.types import Trajectory, VersionRef

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The step that was taken last, so that a publication that failed can be asked for again."""

    step: int
    rollouts: tuple[str, ...]
    metrics: StepMetrics


class Session:
    """An opened run. Every method raises errors of `rl_core.errors`; the position moves only with the weights."""

    def __init__(self, request: OpenRequest) -> None:
        """Load. Raises: SpecError, ModelError, CheckpointError, StoreError."""
        if request.threads is not None:
            torch.set_num_threads(request.threads)
        try:
            stage: Stage = msgspec.convert(request.stage, type=Stage)
        except msgspec.ValidationError as error:
            raise SpecError(f"the stage is not valid: {error}") from error
        self._request = request
        self._store: ObjectStore = open_store(request.store_url)
        self._trainer = Trainer(Path(request.model_dir), stage=stage, seed=request.seed)
        if request.checkpoint is not None:
            load_checkpoint(Path(request.checkpoint), self._trainer, run=request.run)
        self._fence = request.fence
        self._taken: _Taken | None = None
        log.info("event=trainer_opened run=%s epoch=%s step=%s", request.run, request.epoch, self._trainer.steps)

    @property
    def position(self) -> Position:
        """Where the trainer stands."""
        return Position(run=self._request.run, epoch=self._request.epoch, step=self._trainer.steps, fence=self._fence)

    def describe(self) -> dict[str, Any]:
        """What was opened: the root of the weights that the next delta is made from, and how it computes."""
        return {
            "root": weights_root(self._trainer.base_weights()),
            "compute_dtype": str(self._trainer.parameters.dtype),
            "parameters": self._trainer.parameters.count,
            "peak_mb": peak_mb(),
        }

    def step(self, request: StepRequest, progress: Progress) -> dict[str, Any]:
        """Take one step and publish it. Asked again for the step just taken, with the same rollouts, it publishes only.

        Raises: TrainerLost when the trainer does not stand where the request expects, BaseMismatch before anything
        is trained, and what reading, training and publishing raise.
        """
        version = self._check(request)
        seconds: dict[str, float] = {}
        metrics = self._again(request)
        if metrics is None:
            metrics = self._train(request, progress, seconds)
        self._fence = max(self._fence, request.fence)
        answer: dict[str, Any] = {"metrics": msgspec.to_builtins(metrics), "seconds": seconds}
        started = time.perf_counter()
        if request.publish:
            progress({"phase": "publish"})
            answer |= self._publish(request, version, progress)
            seconds["publish"] = time.perf_counter() - started
        else:
            answer["root"] = weights_root(self._trainer.weights())
        release_freed()
        return answer | {"peak_mb": peak_mb()}

    def _check(self, request: StepRequest) -> VersionRef:
        version = VersionRef.parse(request.version)
        here, opened = self.position, self._request
        if (version.lineage, version.epoch) != (opened.lineage, opened.epoch):
            raise TrainerLost(f"asked for {version}; this trainer is of {opened.lineage}:{opened.epoch}; open it again")
        if request.fence < here.fence:
            raise TrainerLost(f"fence {request.fence} is older than {here.fence}; a newer attempt has this trainer")
        if request.step != here.step + 1 and not (self._taken is not None and request.step == here.step):
            raise TrainerLost(f"asked for step {request.step}; this trainer stands after step {here.step}; rebuild it")
        return version

    def _again(self, request: StepRequest) -> StepMetrics | None:
        if self._taken is None or request.step != self._taken.step:
            return None
        if tuple(r.id for r in request.rollouts) != self._taken.rollouts:
            raise TrainerLost(f"step {request.step} was taken with other rollouts; rebuild from a checkpoint")
        return self._taken.metrics

    def _train(self, request: StepRequest, progress: Progress, seconds: dict[str, float]) -> StepMetrics:
        started = time.perf_counter()
        root = weights_root(self._trainer.base_weights())
        if root != request.base.root:
            raise BaseMismatch(
                f"this trainer's last published weights have root {root[:16]}…, not {request.base.root[:16]}… of "
                f"{request.base.version}; rebuild it from a checkpoint of that version"
            )
        progress({"phase": "read", "total": len(request.rollouts)})
        rollouts = [
            TrainRollout(
                ref.id,
                ref.group,
                ref.reward,
                Trajectory.from_bytes(self._store.read(ref.blob)),
                advantage=ref.advantage,
                weight=ref.weight,
                objective=ref.objective,
                demonstration=ref.demonstration,
            )
            for ref in request.rollouts
        ]
        seconds["read"] = time.perf_counter() - started
        metrics = self._trainer.step(rollouts, progress=progress)
        seconds["train"] = metrics.seconds
        self._taken = _Taken(request.step, tuple(r.id for r in request.rollouts), metrics)
        log.info(
            "event=step_taken step=%s reward=%.3f seconds=%.1f", metrics.step, metrics.reward_mean, metrics.seconds
        )
        return metrics

    def _publish(self, request: StepRequest, version: VersionRef, progress: Progress) -> dict[str, Any]:
        """Publish, telling of every segment that stands. The caller tells nothing meanwhile."""
        base = Base(request.base.version, request.base.root, request.base.manifest)
        published: Published = publish_delta(
            self._store,
            old=self._trainer.base_weights(),
            new=self._trainer.weights(),
            version=version,
            base=base,
            fence=request.fence,
            threads=torch.get_num_threads(),
            profile=request.profile,
            on_segment=lambda told: progress({"phase": "publish", "stands": msgspec.to_builtins(told)}),
        )
        self._trainer.mark_published()
        self._taken = None
        return {
            "root": published.root,
            "manifest": published.manifest_key,
            "bytes": published.bytes,
            "encode_s": published.encode_s,
            "upload_s": published.upload_s,
            "full_bytes": published.full_bytes,
            "changed_elements": published.changed_elements,
            "elements": published.elements,
            "reversible": published.reversible,
            "adopted": published.adopted,
        }

    def checkpoint(self, *, fence: int) -> dict[str, Any]:
        """Write a checkpoint. Raises: TrainerLost for an old fence, CheckpointError."""
        if fence < self._fence:
            raise TrainerLost(f"fence {fence} is older than {self._fence}; a newer attempt has this trainer")
        self._fence = fence
        saved = save_checkpoint(
            Path(self._request.checkpoint_root), self._trainer, position=self.position, lineage=self._request.lineage
        )
        release_freed()
        return {"folder": saved.folder, "digest": saved.digest}

    def export(self, *, folder: str) -> dict[str, Any]:
        """Write a Hugging Face folder of the current policy. Raises: ModelError, TrainerError."""
        try:
            self._trainer.export(Path(folder))
        except OSError as error:
            raise TrainerError(f"cannot write {folder}: {error}; free space or check the rights") from error
        return {"folder": folder, "root": weights_root(self._trainer.weights())}
