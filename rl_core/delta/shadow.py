"""The receiver's own copy of the weights, and the version that is known of it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch

from rl_core.delta.root import root_of_leaves, weights_leaves
from rl_core.delta.words import Tensors
from rl_core.models.checkpoint import read_checkpoint


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
        """A shadow of a Hugging Face model folder. Raises: ModelError when it is none, or does not read."""
        return cls.from_tensors(
            read_checkpoint(Path(folder)), version=version, manifest_key=manifest_key, threads=threads
        )

    def recheck(self, *, threads: int = 1) -> bool:
        """Hash every tensor again; False, and `poisoned`, when they are no longer the weights of `root`."""
        if weights_leaves(self.tensors, threads=threads) != self.leaves:
            self.poisoned = True
        return not self.poisoned
