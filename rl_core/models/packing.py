"""Packs: what one forward sees. What sequences have in common at their start is computed once; branches attend to it.

The sequences of a pack form a trie: the system message and worked examples that all prompts share, each group's
prompt, the first turn that several attempts sampled alike. Siblings are one batched piece of attention over the path
above them. The gradient is that of the sequences one by one. Tokens after the last target of a sequence are never
computed, and nothing but attention is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.errors import TrajectoryError

MIN_SHARED_TOKENS = 4  # a shorter common run costs more in small products than it saves

Key = int | tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One token sequence with its targets. `routes` [T', L, K] are recorded experts, T' ≤ T; None: none recorded."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    temperature: float = 1.0
    routes: Tensor | None = None

    @property
    def input_length(self) -> int:
        """Tokens that have to be computed: up to the one before the last target."""
        return len(self.loss_mask) - 1 - list(reversed(self.loss_mask)).index(1)

    def check(self) -> None:
        """Raises: TrajectoryError when there is nothing to train on or to predict from."""
        if 1 not in self.loss_mask:
            raise TrajectoryError("a sequence without sampled tokens cannot be trained on; leave it out")
        if self.loss_mask[0]:
            raise TrajectoryError("the first token of a sequence has nothing to be predicted from; start with a prompt")

    def keys(self) -> list[Key]:
        """What must be equal for a computed token to be shared: the token, and the experts recorded for it."""
        tokens = self.token_ids[: self.input_length]
        if self.routes is None:
            return list(tokens)
        rows = [row.numpy().tobytes() for row in self.routes[: self.input_length]]
        rows += [b""] * (len(tokens) - len(rows))
        return list(zip(tokens, rows, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """Siblings: queries that attend to one prefix whole, and causally to their own branch.

    `rows` [B, L] are positions in the pack, padded with each branch's first; `real` [B, L] marks those that are none
    of the padding; `valid` [n] indexes the flattened `rows` that are real, `flat` [n] holds those rows; `prefix` [P]
    are the rows above.
    """

    rows: Tensor
    real: Tensor
    valid: Tensor
    flat: Tensor
    prefix: Tensor


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward's input. Shapes: tokens, positions [N]; targets M: `rows` [M] predict `targets` [M].

    `owner` [M] is the index of the sequence among those packed, `index` [M] the target's position in it.
    `routes` [N, L, K] holds recorded experts, −1 where none. `sequences` are the owners, once each.
    """

    tokens: Tensor
    positions: Tensor
    pieces: tuple[Piece, ...]
    rows: Tensor
    targets: Tensor
    temperatures: Tensor
    owner: Tensor
    index: Tensor
    routes: Tensor | None
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Member:
    """A sequence in sorted order. `common` tokens are shared with the one before it."""

    number: int
    keys: list[Key]
    common: int


def build_packs(sequences: Sequence[TrainSequence], *, token_budget: int) -> list[Pack]:
    """Arrange all sequences into as few packs of about `token_budget` computed tokens as will do, evenly filled.

    A sequence longer than the budget packs alone. Raises: TrajectoryError for a sequence that cannot be trained on.
    """
    for sequence in sequences:
        sequence.check()
    members = _sorted_members(sequences)
    parts = _cut(members, token_budget)
    low, high = 1, token_budget
    while low < high:  # the smallest budget that needs no more packs: the least memory at the same cost
        middle = (low + high) // 2
        if len(_cut(members, middle)) > len(parts):
            low = middle + 1
        else:
            high = middle
    return [_Flattener(sequences, part).pack() for part in _cut(members, high)]


def _sorted_members(sequences: Sequence[TrainSequence]) -> list[_Member]:
    keyed = sorted(((sequence.keys(), number) for number, sequence in enumerate(sequences)), key=_sort_key)
    members: list[_Member] = []
    for keys, number in keyed:
        common = _common(members[-1].keys, keys) if members else 0
        members.append(_Member(number, keys, common))
    return members


def _sort_key(keyed: tuple[list[Key], int]) -> tuple[list[tuple[int, bytes]], int]:
    return [key if isinstance(key, tuple) else (key, b"") for key in keyed[0]], keyed[1]


def _common(one: list[Key], other: list[Key]) -> int:
    for length, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return length
    return min(len(one), len(other))


def _cut(members: list[_Member], budget: int) -> list[list[_Member]]:
    parts: list[list[_Member]] = []
    used = budget
    for member in members:
        added = len(member.keys) - member.common
        if used + added > budget:
            parts.append([])
            added = used = 0
            added = len(member.keys)
        parts[-1].append(member)
        used += added
    return parts


class _Flattener:
    """Lays the trie of one pack's sequences out, depth first."""

    def __init__(self, sequences: Sequence[TrainSequence], members: list[_Member]) -> None:
        self.sequences = sequences
        self.members = members
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.sources: list[tuple[int, int, int, int]] = []  # pack row, sequence, start, end
        self.rows: dict[int, list[int]] = {member.number: [] for member in members}
        self.pieces: list[Piece] = []

    def pack(self) -> Pack:
        """The pack."""
        self._lay(self.members, depth=0, path=[])
        rows, targets, temperatures, owner, index = zip(*self._targets(), strict=True)
        return Pack(
            tokens=torch.tensor(self.tokens),
            positions=torch.tensor(self.positions),
            pieces=tuple(self.pieces),
            rows=torch.tensor(rows),
            targets=torch.tensor(targets),
            temperatures=torch.tensor(temperatures, dtype=torch.float32),
            owner=torch.tensor(owner),
            index=torch.tensor(index),
            routes=self._routes(),
            sequences=tuple(sorted(self.rows)),
        )

    def _lay(self, members: list[_Member], *, depth: int, path: list[int]) -> None:
        """Lay the siblings that start at `depth` below `path`, then what is below them."""
        spans: list[tuple[int, int]] = []
        below: list[tuple[list[_Member], int, list[int]]] = []
        for cluster in _clusters(members, depth):
            first = cluster[0]
            end = len(first.keys) if len(cluster) == 1 else min(member.common for member in cluster[1:])
            start_row = len(self.tokens)
            own = list(range(start_row, start_row + end - depth))
            self.tokens.extend(self.sequences[first.number].token_ids[depth:end])
            self.positions.extend(range(depth, end))
            self.sources.append((start_row, first.number, depth, end))
            spans.append((start_row, end - depth))
            for member in cluster:
                self.rows[member.number].extend(own)
            longer = [member for member in cluster if len(member.keys) > end]
            if longer:
                below.append((longer, end, path + own))
        self.pieces.append(_piece(spans, path))
        for rest, end, longer_path in below:
            self._lay(rest, depth=end, path=longer_path)

    def _targets(self) -> list[tuple[int, int, float, int, int]]:
        """Row, target, temperature, owner, index of every target, in the caller's order of sequences."""
        out = []
        for number in sorted(self.rows):
            sequence, rows = self.sequences[number], self.rows[number]
            for index, masked in enumerate(sequence.loss_mask):
                if masked:
                    out.append((rows[index - 1], sequence.token_ids[index], sequence.temperature, number, index))
        return out

    def _routes(self) -> Tensor | None:
        recorded = [self.sequences[m.number].routes for m in self.members]
        shape = next((routes.shape[1:] for routes in recorded if routes is not None), None)
        if shape is None:
            return None
        out = torch.full((len(self.tokens), *shape), -1, dtype=torch.int64)
        for row, number, start, end in self.sources:
            routes = self.sequences[number].routes
            if routes is not None:
                part = routes[start : min(end, routes.shape[0])]
                out[row : row + part.shape[0]] = part
        return out


def _clusters(members: list[_Member], depth: int) -> list[list[_Member]]:
    """Split where neighbours share too little below `depth` to be worth a node."""
    clusters: list[list[_Member]] = []
    for member in members:
        if clusters and member.common - depth >= MIN_SHARED_TOKENS:
            clusters[-1].append(member)
        else:
            clusters.append([member])
    return clusters


def _piece(spans: list[tuple[int, int]], path: list[int]) -> Piece:
    width = max(length for _, length in spans)
    steps = torch.arange(width)
    starts = torch.tensor([start for start, _ in spans])[:, None]
    lengths = torch.tensor([length for _, length in spans])[:, None]
    real = steps[None, :] < lengths
    rows = torch.where(real, starts + steps[None, :], starts)
    valid = real.flatten().nonzero().squeeze(1)
    return Piece(rows, real, valid, rows.flatten()[valid], torch.tensor(path, dtype=torch.int64))
