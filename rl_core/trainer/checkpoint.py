"""Checkpoints of a trainer: everything a bit-exact resume needs, written once, whole or not at all.

A checkpoint is a folder `step-<step>-f<fence>` with `state.safetensors` (master weights, moments, generator, and the
last published weights where they differ), `state.json` (position, spec, compute dtype) and, written last, `DIGEST`
with the BLAKE3 of both. A folder without a `DIGEST`, or with one that does not match, is torn.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from rl_core.errors import CheckpointError
from rl_core.models.parameters import ComputeDtype
from rl_core.specs import Stage
from rl_core.trainer.messages import Position
from rl_core.trainer.trainer import Trainer

FORMAT: Final = 1
KEPT: Final = 2
STATE: Final = "state.safetensors"
META: Final = "state.json"
DIGEST: Final = "DIGEST"
_NAME: Final = re.compile(r"step-(\d+)-f(\d+)")
_CHUNK: Final = 16 << 20
_DTYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is of."""

    format: int
    position: Position
    lineage: str
    steps: int
    stage: Stage
    compute_dtype: ComputeDtype


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that stands: its folder, and the BLAKE3 of its `DIGEST` file."""

    folder: str
    digest: str


def save_checkpoint(root: Path, trainer: Trainer, *, position: Position, lineage: str) -> SavedCheckpoint:
    """Write the trainer's state under `root`, then drop all but the newest two.

    A whole checkpoint that stands under the same step and fence is adopted; a torn one is written again.
    Raises: CheckpointError when it cannot be written.
    """
    folder = Path(root) / f"step-{position.step:06d}-f{position.fence}"
    meta = CheckpointMeta(
        format=FORMAT,
        position=position,
        lineage=lineage,
        steps=trainer.steps,
        stage=trainer.stage,
        compute_dtype=trainer.parameters.dtype,
    )
    try:
        if (folder / DIGEST).is_file():
            return SavedCheckpoint(folder=str(folder), digest=_verify(folder))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        digests = {
            STATE: _write(folder / STATE, _safetensors_bytes(trainer.state_tensors())),
            META: _write(folder / META, iter([msgspec.json.encode(meta)])),
        }
        written = json.dumps(digests, sort_keys=True).encode()
        _write(folder / DIGEST, iter([written]))
        _sync_folder(folder)
        _sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {error}; free space or check the rights"
        ) from error
    _prune(Path(root), keep=folder)
    return SavedCheckpoint(folder=str(folder), digest=blake3(written).hexdigest())


def read_meta(folder: Path) -> CheckpointMeta:
    """Verify a checkpoint's digests and read what it is of. Raises: CheckpointError."""
    folder = Path(folder)
    _verify(folder)
    try:
        meta = msgspec.json.decode((folder / META).read_bytes(), type=CheckpointMeta)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{folder / META} is of another build: {error}") from error
    if meta.format != FORMAT:
        raise CheckpointError(f"{folder} has format {meta.format}, this build reads {FORMAT}; upgrade Slipway")
    return meta


def load_checkpoint(folder: Path, trainer: Trainer, *, run: str) -> CheckpointMeta:
    """Put `trainer` exactly where the checkpoint was taken.

    Raises: CheckpointError when the checkpoint is torn, of another run, or of another compute dtype.
    """
    meta = read_meta(folder)
    if meta.position.run != run:
        raise CheckpointError(f"{folder} is a checkpoint of run {meta.position.run}, not of {run}")
    if meta.compute_dtype is not trainer.parameters.dtype:
        raise CheckpointError(
            f"{folder} was computed in {meta.compute_dtype}, this machine computes in {trainer.parameters.dtype}; "
            "resume on a machine of the first kind"
        )
    with safe_open(str(Path(folder) / STATE), framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    step = "optimizer.step"
    if step in tensors:
        tensors[step] = tensors[step].reshape(())
    trainer.load_state(tensors, steps=meta.steps)
    return meta


def _safetensors_bytes(tensors: dict[str, Tensor]) -> Iterator[memoryview | bytes]:
    """The safetensors file of `tensors`, streamed: the library's own writer would copy all of it in memory first."""
    flat = {name: tensor.reshape(-1).contiguous() for name, tensor in sorted(tensors.items())}
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in flat.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for tensor in flat.values():
        whole = memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(whole), _CHUNK):
            yield whole[start : start + _CHUNK]


def _write(path: Path, chunks: Iterator[memoryview | bytes]) -> str:
    """Create the file, durable when this returns; its BLAKE3."""
    digest = blake3()
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return str(digest.hexdigest())


def _verify(folder: Path) -> str:
    """Check every digest; the BLAKE3 of the `DIGEST` file. Raises: CheckpointError."""
    try:
        written = (folder / DIGEST).read_bytes()
        digests = json.loads(written)
        for name in (STATE, META):
            with (folder / name).open("rb") as file:
                if _digest_of(file) != digests[name]:
                    raise CheckpointError(
                        f"{folder / name} is not what its digest says; go back to an older checkpoint"
                    )
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is torn or is no checkpoint ({error}); go back to an older one") from error
    return str(blake3(written).hexdigest())


def _digest_of(file: BinaryIO) -> str:
    digest = blake3()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return str(digest.hexdigest())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Path, *, keep: Path) -> None:
    """Remove all but the newest whole checkpoints, `keep` among them, and torn ones that nothing will finish."""
    found = []
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path != keep:
            found.append((int(match[1]), int(match[2]), path))
    whole = [entry for entry in sorted(found, reverse=True) if (entry[2] / DIGEST).is_file()]
    for entry in found:
        if entry not in whole[: KEPT - 1]:
            shutil.rmtree(entry[2], ignore_errors=True)
