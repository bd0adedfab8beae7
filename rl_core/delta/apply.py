"""One hop applied to a shadow as a transaction: commit when the root is right, else everything is taken back."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import torch

from rl_core.delta.codec import FrameMode, Patch, decode_frame
from rl_core.delta.frames import pieces_of, split_patch
from rl_core.delta.manifest import Frame, TensorEntry
from rl_core.delta.path import Hop, HopKind
from rl_core.delta.root import root_of_leaves, weights_leaves
from rl_core.delta.shadow import ShadowWeights
from rl_core.delta.words import Words, dtype_tag, empty_tensor, word_dtype, words_of
from rl_core.errors import BaseMismatch, DigestMismatch


class HopApplication:
    """A context: `apply` payloads, then `commit`. Leaving without a commit restores the shadow, or poisons it.

    While it is open the shadow counts as poisoned, so that even a killed thread never leaves half a version that
    passes for a whole one.
    """

    def __init__(self, shadow: ShadowWeights, hop: Hop, *, threads: int) -> None:
        self._shadow = shadow
        self._hop = hop
        self._threads = threads
        self._entries = hop.manifest.tensors
        self._tensors: dict[str, torch.Tensor] = {}
        self._words: list[Words] = []
        self._undo: list[tuple[Frame, memoryview | Words]] = []
        self._touched: set[str] = set()
        self._was_poisoned = shadow.poisoned
        self._committed = False

    def __enter__(self) -> Self:
        self._check_base()
        self._tensors = {entry.name: self._place(entry) for entry in self._entries}
        self._words = [words_of(self._tensors[entry.name]) for entry in self._entries]
        if self._hop.kind is not HopKind.SNAPSHOT:
            self._shadow.poisoned = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed and self._hop.kind is not HopKind.SNAPSHOT:
            self._take_back()

    def apply(self, payloads: Mapping[int, memoryview]) -> None:
        """Decode and apply frames, by index, whose digests were checked. Raises: DigestMismatch."""
        # Frames hold disjoint elements, so they may be applied side by side.
        if self._threads == 1:
            for index, payload in payloads.items():
                self._apply_frame(index, payload)
            return
        with ThreadPoolExecutor(self._threads) as pool:
            for done in [pool.submit(self._apply_frame, index, payload) for index, payload in payloads.items()]:
                done.result()

    def commit(self) -> None:
        """Check leaves and root of what came out, then make it the shadow. Raises: DigestMismatch."""
        after, shadow = self._hop.leads_to, self._shadow
        # All of them, not only those that the hop touched: memory that somebody else wrote to is found here.
        leaves = weights_leaves(self._tensors, threads=self._threads)
        if self._hop.kind is not HopKind.BACKWARD:
            wrong = [entry.name for entry in self._entries if leaves.get(entry.name) != entry.leaf]
            if wrong:
                raise DigestMismatch(
                    f"{after.version}: tensor {wrong[0]} did not come out as published; fetch it again"
                )
        if root_of_leaves(leaves) != after.root:
            raise DigestMismatch(f"{after.version}: the weights did not come out with the published root; fetch again")
        if self._hop.kind is HopKind.SNAPSHOT and not self._was_poisoned:
            self._keep_equal(leaves)
        shadow.unreported |= self._touched
        shadow.tensors, shadow.leaves, shadow.root = self._tensors, leaves, after.root
        shadow.version, shadow.manifest_key = after.version, after.manifest
        shadow.poisoned = False
        self._committed = True

    def _check_base(self) -> None:
        manifest, shadow = self._hop.manifest, self._shadow
        if self._hop.kind is HopKind.SNAPSHOT:
            return
        needed = manifest.root if self._hop.kind is HopKind.BACKWARD else manifest.base and manifest.base.root
        if shadow.poisoned or shadow.root != needed:
            raise BaseMismatch(
                f"{self._hop.manifest_key} needs weights with root {str(needed)[:16]}…; at hand are {shadow.root[:16]}…"
                f"{' (damaged)' if shadow.poisoned else ''}. Nothing was applied; plan the path again"
            )

    def _place(self, entry: TensorEntry) -> torch.Tensor:
        """Where the tensor comes out: the shadow's own memory if it fits the patch, else new memory."""
        present = self._shadow.tensors.get(entry.name)
        fits = present is not None and dtype_tag(present) == entry.dtype and list(present.shape) == entry.shape
        if present is not None and fits and self._hop.kind is not HopKind.SNAPSHOT:
            return present
        self._touched.add(entry.name)
        return empty_tensor(dtype=entry.dtype, shape=entry.shape)

    def _apply_frame(self, index: int, payload: memoryview) -> None:
        frame = self._hop.manifest.frames[index]
        patches = self._decode(frame, payload)
        targets = self._targets(frame)
        if self._hop.kind is not HopKind.SNAPSHOT:
            whole = frame.mode is FrameMode.RAW
            self._undo.append((frame, np.concatenate(self._targets(frame)) if whole else payload))
        # A frame of small tensors may leave most of them as they are.
        moved = [piece for piece, patch in zip(frame.ranges, patches, strict=True) if patch.values.size]
        self._touched.update(self._entries[piece.tensor].name for piece in moved)
        backward = self._hop.kind is HopKind.BACKWARD
        for patch, words in zip(patches, targets, strict=True):
            (patch.revert if backward else patch.apply)(words)

    def _decode(self, frame: Frame, payload: memoryview) -> list[Patch]:
        dtype = word_dtype(self._entries[frame.ranges[0].tensor].dtype)
        return split_patch(decode_frame(frame.mode, payload, dtype=dtype, count=frame.count), frame.ranges)

    def _targets(self, frame: Frame) -> list[Words]:
        return pieces_of(frame.ranges, self._words)

    def _take_back(self) -> None:
        """Undo the frames in reverse, and believe it only if the old leaves come out again."""
        shadow = self._shadow
        shadow.unreported |= {name for name in self._touched if name in shadow.tensors}
        for frame, kept in reversed(self._undo):
            if isinstance(kept, memoryview):
                for patch, words in zip(self._decode(frame, kept), self._targets(frame), strict=True):
                    (patch.apply if self._hop.kind is HopKind.BACKWARD else patch.revert)(words)
            else:
                for patch, words in zip(
                    split_patch(Patch(None, kept), frame.ranges), self._targets(frame), strict=True
                ):
                    patch.apply(words)
        shadow.poisoned = weights_leaves(shadow.tensors, threads=self._threads) != shadow.leaves

    def _keep_equal(self, leaves: dict[str, str]) -> None:
        """Of a snapshot, keep the memory of tensors that it did not change."""
        for name, leaf in leaves.items():
            if self._shadow.leaves.get(name) == leaf:
                self._tensors[name] = self._shadow.tensors[name]
                self._touched.discard(name)
