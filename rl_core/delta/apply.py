"""One hop applied to a shadow as a transaction: commit when the root is right, else everything is taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch
import xxhash

from rl_core.delta.codec import decode_frame
from rl_core.delta.frames import pieces_of
from rl_core.delta.manifest import FRAME_BYTES, Frame, Manifest, TensorEntry
from rl_core.delta.patches import Patch, whole_patches
from rl_core.delta.path import Hop, HopKind
from rl_core.delta.root import leaf_hash, root_of_leaves, weights_leaves
from rl_core.delta.shadow import ShadowWeights
from rl_core.delta.words import DTYPES, Words, dtype_tag, words_of
from rl_core.errors import BaseMismatch, DigestMismatch
from rl_core.memory import empty_tensor

_UNDO_SHARE: Final = 20  # what is kept to take a hop back is at most a twentieth of the weights, and a frame


class HopApplication:
    """A context: `apply` payloads, then `commit`. Leaving without a commit restores the shadow, or poisons it.

    One whose manifest is not there yet is begun by `begin` instead: `expect` and `settle` then say what is known, and
    `complete` that all is. While it is open the shadow counts as poisoned, so that even a killed thread never leaves
    half a version that passes for a whole one. Tensors are hashed on threads of their own, each once no frame is left
    that touches it. A hop that would need more memory to be taken back than is bounded here is not: it poisons, and a
    snapshot repairs. Memory that came out wrong though the hop never wrote to it makes the shadow `damaged`, too.
    """

    def __init__(self, shadow: ShadowWeights, hop: Hop, *, threads: int) -> None:
        self._shadow = shadow
        self._hop = hop
        self._threads = threads
        self._entries = hop.manifest.tensors
        self._tensors: dict[str, torch.Tensor] = {}
        self._words: list[Words] = []
        self._undo: list[tuple[Frame, memoryview | Words]] = []
        self._undo_left = hop.manifest.full_bytes // _UNDO_SHARE + FRAME_BYTES
        # Of each tensor: frames that are known and not applied, and 1 while others may come.
        self._frames_left = [1] * len(self._entries)
        self._settled = [False] * len(self._entries)
        self._expected = 0
        self._leaves: dict[str, Future[str]] = {}
        self._decoders = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._hashers = ThreadPoolExecutor(threads, thread_name_prefix="hash")
        self._touched: set[str] = set()
        self._was_poisoned = shadow.poisoned
        self._committed = False

    def __enter__(self) -> Self:
        self.begin()
        self.complete(self._hop)
        return self

    def begin(self) -> None:
        """Take the shadow. Raises: BaseMismatch."""
        self._check_base()
        self._tensors = {entry.name: self._place(entry) for entry in self._entries}
        self._words = [words_of(self._tensors[entry.name]) for entry in self._entries]
        if self._hop.kind is not HopKind.SNAPSHOT:
            self._shadow.poisoned = True

    def expect(self) -> None:
        """The hop's manifest has these frames, and may come to have others."""
        frames = self._hop.manifest.frames
        for frame in frames[self._expected :]:
            for piece in frame.ranges:
                self._frames_left[piece.tensor] += 1
        self._expected = len(frames)

    def settle(self, tensors: Iterable[int]) -> None:
        """No frame that is not known yet touches these tensors, by index."""
        for index in tensors:
            if not self._settled[index]:
                self._settled[index] = True
                self._one_less(index)

    def complete(self, hop: Hop) -> None:
        """`hop` is the whole of what was begun; its manifest begins with the frames that were expected."""
        self._hop, self._entries = hop, hop.manifest.tensors
        self.expect()
        # All of them, not only those that the hop touches: memory that somebody else wrote to is found here.
        self.settle(range(len(self._entries)))

    def stays_reversible(self, frames: Sequence[Frame]) -> bool:
        """Whether the hop can still be taken back after these frames, whose payloads are not resident."""
        itemsizes = (self._words[frame.ranges[0].tensor].itemsize for frame in frames)
        kept = sum(
            frame.count * itemsize for frame, itemsize in zip(frames, itemsizes, strict=True) if not frame.mode.sparse
        )
        return kept <= self._undo_left

    def abandon(self) -> None:
        """The process ends, and the shadow with it: nothing is taken back."""
        self._decoders.shutdown(cancel_futures=True)
        self._hashers.shutdown(cancel_futures=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()
        if not self._committed and self._hop.kind is not HopKind.SNAPSHOT:
            self._take_back()

    def apply(self, payloads: Mapping[int, memoryview], *, resident: bool = True) -> None:
        """Decode and apply frames, by index, whose digests were checked. Raises: DigestMismatch.

        `resident`: the payloads lie in memory, which keeping them would hold.
        """
        # Frames hold disjoint elements, so they may be applied side by side.
        applying = [self._decoders.submit(self._apply_frame, index, payload) for index, payload in payloads.items()]
        failed: Exception | None = None
        for index, applied in zip(payloads, applying, strict=True):
            try:
                kept = applied.result()
            except Exception as error:  # noqa: BLE001 (the frames beside it were applied, and have to be taken back)
                failed = error
                continue
            if kept is not None:
                self._keep(self._hop.manifest.frames[index], kept, resident=resident)
            for piece in self._hop.manifest.frames[index].ranges:
                self._one_less(piece.tensor)
        if failed is not None:
            raise failed

    def _one_less(self, index: int) -> None:
        """A frame fewer is left for a tensor; the last one lets it be hashed."""
        self._frames_left[index] -= 1
        if not self._frames_left[index]:
            name = self._entries[index].name
            self._leaves[name] = self._hashers.submit(leaf_hash, name, self._tensors[name])

    def _keep(self, frame: Frame, kept: memoryview | Words, *, resident: bool) -> None:
        """Keep what takes a frame back, as long as there is room."""
        if resident or not isinstance(kept, memoryview):
            self._undo_left -= kept.nbytes
        if self._undo_left < 0:
            self._undo.clear()
        else:
            self._undo.append((frame, kept))

    def commit(self) -> None:
        """Check leaves and root of what came out, then make it the shadow. Raises: DigestMismatch."""
        after, shadow = self._hop.leads_to, self._shadow
        leaves = {name: leaf.result() for name, leaf in self._leaves.items()}
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
        shadow.poisoned = shadow.damaged = False
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
        return empty_tensor(entry.shape, DTYPES[entry.dtype])

    def _apply_frame(self, index: int, payload: memoryview) -> memoryview | Words | None:
        """Apply a frame; what takes it back, None for a snapshot."""
        frame = self._hop.manifest.frames[index]
        backward = self._hop.kind is HopKind.BACKWARD
        targets = self._targets(frame)
        patches = self._decode(frame, payload, backward=backward)
        kept: memoryview | Words | None = None
        if self._hop.kind is not HopKind.SNAPSHOT:
            kept = payload if frame.mode.sparse else np.concatenate(targets)
        # A frame of small tensors may leave most of them as they are.
        moved = [piece for piece, patch in zip(frame.ranges, patches, strict=True) if patch.values.size]
        self._touched.update(self._entries[piece.tensor].name for piece in moved)
        for patch, words in zip(patches, targets, strict=True):
            (patch.revert if backward else patch.apply)(words)
        return kept

    def _decode(self, frame: Frame, payload: memoryview, *, backward: bool) -> list[Patch]:
        pieces, codec = self._targets(frame), self._hop.manifest.codec
        return decode_frame(frame.mode, payload, pieces=pieces, backward=backward, codec=codec)

    def _targets(self, frame: Frame) -> list[Words]:
        return pieces_of(frame.ranges, self._words)

    def _take_back(self) -> None:
        """Undo the frames in reverse, and believe it only if the old leaves come out again."""
        shadow = self._shadow
        with suppress(DigestMismatch):  # a frame that was applied in part does not read; the leaves tell
            for frame, kept in reversed(self._undo):
                self._take_back_frame(frame, kept)
        shadow.note(weights_leaves(shadow.tensors, threads=self._threads), written=self._touched)

    def _take_back_frame(self, frame: Frame, kept: memoryview | Words) -> None:
        targets, was_backward = self._targets(frame), self._hop.kind is HopKind.BACKWARD
        if isinstance(kept, memoryview):
            patches = self._decode(frame, kept, backward=not was_backward)
        else:
            patches = whole_patches(kept, targets)
        for patch, words in zip(patches, targets, strict=True):
            (patch.revert if frame.mode.sparse and not was_backward else patch.apply)(words)

    def _keep_equal(self, leaves: dict[str, str]) -> None:
        """Of a snapshot, keep the memory of tensors that it did not change."""
        for name, leaf in leaves.items():
            if self._shadow.leaves.get(name) == leaf:
                self._tensors[name] = self._shadow.tensors[name]
                self._touched.discard(name)


def payloads_of(manifest: Manifest, indices: Iterable[int], segment: memoryview) -> dict[int, memoryview]:
    """A segment's payloads by the index of their frame. Raises: DigestMismatch."""
    frames = {index: manifest.frames[index] for index in indices}
    payloads = {index: segment[frame.offset : frame.offset + frame.size] for index, frame in frames.items()}
    if any(xxhash.xxh3_64_hexdigest(payload) != frames[index].xxh3 for index, payload in payloads.items()):
        raise DigestMismatch(f"a frame of {manifest.version} is not what its digest says; fetch it again")
    return payloads
