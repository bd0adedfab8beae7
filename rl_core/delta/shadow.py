"""The receiver's own copy of the weights, and the version that is known of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rl_core.delta.root import root_of_leaves, weights_leaves
from rl_core.delta.words import Tensors
from rl_core.errors import ModelError


class ShadowWeights:
    """Checkpoint-named CPU tensors with their root, version and manifest.

    `reconcile` alone writes to it, and in place: whoever wants to keep a tensor across the next reconcile copies it.
    `poisoned` says that the tensors are not the weights their root names; the next reconcile then repairs them from a
    snapshot. Not safe to share between threads.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], *, leaves: dict[str, str], version: str, manifest_key: str | None
    ) -> None:
        self.tensors = tensors
        self.leaves = leaves
        self.root = root_of_leaves(leaves)
        self.version = version
        self.manifest_key = manifest_key
        self.poisoned = False
        # Names written to since the last reconcile that returned: a failure half-way up a chain must not hide from
        # the engine what the steps before it changed.
        self.unreported: set[str] = set()

    @classmethod
    def from_tensors(
        cls, tensors: Tensors, *, version: str = "", manifest_key: str | None = None, threads: int = 1
    ) -> Self:
        """A shadow holding copies of `tensors`. `version` is the text form, empty where it is not known.

        Raises: ModelError for tensors that checkpoints do not hold.
        """
        copies = {
            name: tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in sorted(tensors)
        }
        return cls(copies, leaves=weights_leaves(copies, threads=threads), version=version, manifest_key=manifest_key)

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str, *, version: str = "", manifest_key: str | None = None, threads: int = 1
    ) -> Self:
        """A shadow of a Hugging Face folder's safetensors (one file, or shards with their index).

        Raises: ModelError when the folder holds none, or they do not read.
        """
        tensors: dict[str, torch.Tensor] = {}
        for path in checkpoint_files(Path(folder)):
            try:
                tensors.update(load_file(path))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} does not read: {error}; convert or download the model again") from error
        return cls.from_tensors(tensors, version=version, manifest_key=manifest_key, threads=threads)

    def recheck(self, *, threads: int = 1) -> bool:
        """Hash every tensor again; False, and `poisoned`, when they are no longer the weights of `root`."""
        if weights_leaves(self.tensors, threads=threads) != self.leaves:
            self.poisoned = True
        return not self.poisoned


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: those its index names, else all. Raises: ModelError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of shards: {error}; download the model again") from error
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        what = f"lacks {', '.join(missing)}" if missing else "holds no *.safetensors"
        raise ModelError(f"{folder} {what}; point it at a converted Hugging Face model folder")
    return paths
