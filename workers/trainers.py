"""The resident trainer of a train worker, and how it comes to stand where a step expects it.

It is built from the newest whole checkpoint and the recorded batches since. Equal roots adopt what was published;
a different one opens a new epoch, whose first delta is made from the checkpoint's version.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from django.conf import settings

from controlplane.models import PolicyVersion, Run, Step
from controlplane.selectors.batches import batch_rows
from controlplane.services.steps import TRAINER
from controlplane.services.versions import epoch_open
from controlplane.states import StepState, VersionState
from rl_core.errors import BaseMismatch, CheckpointError, ObjectExists, TrainerLost
from rl_core.trainer.client import Progress, TrainerProcess
from rl_core.trainer.messages import Op
from rl_core.types import Profile, VersionRef
from workers.base import Attempt
from workers.control import materialise

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 540.0  # of silence; a step of any length tells how far it is
_CHECKPOINT = re.compile(r"step-(\d+)-f(\d+)")


class ResidentTrainer:
    """One trainer process, kept from step to step.

    `_base` is the version whose weights its next delta is made from; `_at` the committed version that its state
    belongs to. They differ only after a replay that came out otherwise.
    """

    def __init__(self) -> None:
        self._process: TrainerProcess | None = None
        self._stage_id: object = None
        self._base: PolicyVersion | None = None
        self._at: object = None

    def stand_before(self, step: Step, attempt: Attempt) -> None:
        """Be where `step` can be taken, by rebuilding when need be. Raises: what opening and replaying raise."""
        self.guard(attempt)
        if not self._stands_before(step):
            self._rebuild(step, attempt)

    def take(
        self,
        step: Step,
        *,
        version: VersionRef,
        fence: int,
        publish: bool = True,
        profile: Profile = Profile.SMALL,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Take one step in the process. `progress` is told what `trainer.session` says of it.

        Raises: TrainerLost when it does not stand there; what training raises.
        """
        if self._base is None:
            raise TrainerLost("the trainer was not opened")
        base = self._base
        return self._call(
            Op.STEP,
            step=step.number,
            fence=fence,
            version=str(version),
            base={"version": str(base.ref), "root": base.root, "manifest": base.manifest_key},
            rollouts=_rollouts(step),
            publish=publish,
            profile=profile,
            progress=progress,
        )

    @property
    def base(self) -> PolicyVersion | None:
        """The version whose weights the next delta is made from."""
        return self._base

    def published(self, version: PolicyVersion) -> None:
        """The step's version is committed: the next delta is made from it."""
        self._base, self._at = version, version.pk

    def checkpoint(self, *, fence: int) -> str:
        """Write a checkpoint; its folder. Raises: CheckpointError, TrainerLost."""
        return str(self._call(Op.CHECKPOINT, fence=fence)["folder"])

    def guard(self, attempt: Attempt) -> None:
        """End the process when the attempt's lease is lost: its result would be refused."""
        process = self._started()

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

        attempt.on_loss(kill)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
        self._process, self._stage_id, self._base, self._at = None, None, None, None

    def _started(self) -> TrainerProcess:
        if self._process is None or not self._process.alive:
            self.close()
            self._process = TrainerProcess.start(threads=settings.TRAINER_THREADS)
        return self._process

    def _call(self, op: Op, **payload: Any) -> dict[str, Any]:
        return self._started().call(op, timeout_s=CALL_TIMEOUT_S, **payload)

    def _stands_before(self, step: Step) -> bool:
        """Whether the next step, or a second publication of this one, can be asked of the process as it is."""
        position = self._process.position if self._process is not None and self._process.alive else None
        if position is None or (self._at, self._stage_id) != (step.base_version_id, step.stage_id):
            return False
        here = (position.run, position.epoch) == (str(step.run_id), step.run.lineage.epoch)
        return here and position.step in (step.number - 1, step.number)

    def _rebuild(self, step: Step, attempt: Attempt) -> None:
        """Open, and replay what was published since. The lineage's epoch may have moved on when this returns."""
        run = step.run
        self._at = None
        run.lineage.refresh_from_db()
        for folder, number in [*_checkpoints(run, before=step), ("", 0)]:
            try:
                self._replay(step, folder, number, attempt)
            except CheckpointError as error:
                if not folder:
                    raise
                log.warning("checkpoint_unusable", folder=folder, error=str(error)[:300])
            else:
                self._stage_id, self._at = step.stage_id, step.base_version_id
                log.info("trainer_rebuilt", checkpoint=folder, steps_replayed=step.number - 1 - number)
                return

    def _replay(self, step: Step, folder: str, number: int, attempt: Attempt) -> None:
        run = step.run
        since = list(
            run.steps.filter(state=StepState.PUBLISHED, number__gt=number, number__lt=step.number)
            .select_related("version", "base_version")
            .order_by("number")
        )
        if any(past.stage_id != step.stage_id for past in since):
            raise CheckpointError(f"no whole checkpoint of stage {step.stage.position} of run {run.pk} is left")
        same_epoch = all(past.version and past.version.epoch == run.lineage.epoch for past in since)
        self._open(run, step, folder)
        if same_epoch and self._adopt(since, attempt):
            return
        reason = f"weights derived again after step {number} differ from those published"
        epoch_open(run=run, lineage=run.lineage, actor=TRAINER, reason=reason)
        log.warning("epoch_opened", epoch=run.lineage.epoch, after_step=number)
        self._open(run, step, folder)
        for past in since:
            attempt.check()
            again = VersionRef(str(run.lineage_id), run.lineage.epoch, past.number)
            self.take(past, version=again, fence=_fence(past), publish=False)

    def _open(self, run: Run, step: Step, folder: str) -> None:
        """Load the run's first version or a checkpoint, and find the version that its weights are."""
        opened = self._call(
            Op.OPEN,
            run=str(run.pk),
            model_dir=_model_folder(run),
            store_url=settings.STORE_URL,
            checkpoint_root=str(checkpoint_root(run)),
            stage=step.stage.spec,
            seed=run.spec["seed"],
            lineage=str(run.lineage_id),
            epoch=run.lineage.epoch,
            checkpoint=folder or None,
            threads=settings.TRAINER_THREADS,
        )
        known = PolicyVersion.objects.filter(
            lineage_id=run.lineage_id, state=VersionState.COMMITTED, root=opened["root"], number__lt=step.number
        )
        self._base = known.select_related("parent", "lineage__model").order_by("-epoch", "-number").first()
        if self._base is None:
            raise CheckpointError(f"{folder or 'the model'} holds weights that no version of the run names")

    def _adopt(self, since: Sequence[Step], attempt: Attempt) -> bool:
        """Take the steps since again, publishing what stands there already; False when any comes out otherwise."""
        for past in since:
            attempt.check()
            version = past.version
            if version is None:
                raise CheckpointError(f"step {past.number} is published without a version")
            try:
                answer = self.take(past, version=version.ref, fence=version.fence)
            except (ObjectExists, BaseMismatch) as error:
                log.warning("replay_differs", step=past.number, error=str(error)[:300])
                return False
            if answer["root"] != version.root:
                log.warning("replay_differs", step=past.number, root=answer["root"], published=version.root)
                return False
            self._base = version
        return True


def checkpoint_root(run: Run) -> Path:
    """Where a run's checkpoints lie."""
    return Path(settings.CHECKPOINT_DIR) / str(run.pk)


def _checkpoints(run: Run, *, before: Step) -> list[tuple[str, int]]:
    """Checkpoint folders of the run from which the step can be reached, newest first, with their step numbers."""
    root = checkpoint_root(run)
    if not root.is_dir():
        return []
    found = []
    for folder in root.iterdir():
        match = _CHECKPOINT.fullmatch(folder.name)
        if match is not None and int(match[1]) < before.number:
            found.append((int(match[1]), int(match[2]), str(folder)))
    return [(folder, number) for number, _, folder in sorted(found, reverse=True)]


def _model_folder(run: Run) -> str:
    """The folder of the run's first version: the model's, or a fork's parent written out."""
    first = PolicyVersion.objects.select_related("parent", "lineage__model").get(
        lineage_id=run.lineage_id, epoch=0, number=0
    )
    if first.root == first.lineage.model.root:
        return first.lineage.model.folder
    return str(materialise(first, Path(settings.CHECKPOINT_DIR) / "bases" / str(run.lineage_id)))


def _rollouts(step: Step) -> list[dict[str, Any]]:
    return [
        {
            "id": str(row.item.rollout_id or row.item.generation_id),
            "group": row.item.group_key,
            "reward": row.item.reward,
            "blob": row.item.trajectory_key,
            "advantage": row.item.advantage,
            "weight": row.item.weight,
            "objective": row.item.objective,
            "demonstration": row.demonstration,
        }
        for row in batch_rows(step)
    ]


def _fence(past: Step) -> int:
    return past.version.fence if past.version else 0
