"""The receiver's own copy of the weights, and the version that is known of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Self

import torch

from rl_core.delta.root import root_of_leaves, weights_leaves
from rl_core.delta.words import Tensors
from rl_core.errors import ModelError
from rl_core.memory import copied
from rl_core.models.checkpoint import read_checkpoint

Form = tuple[torch.dtype, tuple[int, ...]]


def forms_of(tensors: Tensors) -> dict[str, Form]:
    """Dtype and shape of each tensor."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def refuse_another_form(version: str, tensors: Tensors, *, serving: Mapping[str, Form]) -> None:
    """Raises: ModelError for tensors of other names, shapes or dtypes than those of the model that serves."""
    wanted = forms_of(tensors)
    for name in sorted(wanted.keys() | serving.keys()):
        if wanted.get(name) != serving.get(name):
            raise ModelError(
                f"{version} has {name} as {_words(wanted.get(name))}, and the model that serves has it as "
                f"{_words(serving.get(name))}; start the engine on a folder of that form to serve it"
            )


def _words(form: Form | None) -> str:
    return "nothing" if form is None else f"{form[0]} {list(form[1])}"


class ShadowWeights:
    """Checkpoint-named CPU tensors with their root, version and manifest.

    `reconcile` alone writes to it, and in place: whoever wants to keep a tensor across the next reconcile copies it.
    `poisoned` says that the tensors are not the weights their root names; the next reconcile then repairs them from a
    snapshot. `damaged` says that this was not a hop's doing, which could not be taken back, but somebody else's: what
    the machine does to this memory it may do to what serves. Not safe to share between threads.
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
        self.damaged = False
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
        copies = {name: copied(tensors[name]) for name in sorted(tensors)}
        return cls(copies, leaves=weights_leaves(copies, threads=threads), version=version, manifest_key=manifest_key)

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str, *, version: str = "", manifest_key: str | None = None, threads: int = 1
    ) -> Self:
        """A shadow of a Hugging Face model folder. Raises: ModelError when it is none, or does not read."""
        return cls.from_tensors(
            read_checkpoint(Path(folder)), version=version, manifest_key=manifest_key, threads=threads
        )

    def doubt(self) -> None:
        """Believe nothing that is here: the next reconcile takes a snapshot, and reports every tensor as changed."""
        self.poisoned = True
        self.unreported.update(self.tensors)

    def recheck(self, *, threads: int = 1) -> bool:
        """Hash every tensor again; False, and `poisoned`, when they are no longer the weights of `root`."""
        self.note(weights_leaves(self.tensors, threads=threads))
        return not self.poisoned

    def note(self, leaves: Mapping[str, str], *, written: Collection[str] = ()) -> None:
        """What hashing all tensors gave, after a hop that wrote to some of them, or to none."""
        wrong = {name for name, leaf in leaves.items() if leaf != self.leaves[name]}
        self.poisoned = bool(wrong)
        self.damaged = bool(wrong - set(written))
