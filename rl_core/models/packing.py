"""Packs: what one forward sees. Attempts at one prompt share it: it is computed once, its branches attend to it.

A tree is a prompt with its branches; a pack is as many trees as its token budget holds, flattened without padding.
Tokens after the last target of a sequence are never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.errors import TrajectoryError


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One token sequence with its targets. `routes` [T', L, K] are recorded experts, T' ≤ T; None: none recorded.

    Sequences of one `group` whose prompts (tokens before the first target) are equal share them.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    group: str
    temperature: float = 1.0
    routes: Tensor | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens before the first target."""
        return self.loss_mask.index(1)

    @property
    def input_length(self) -> int:
        """Tokens that have to be computed: up to the one before the last target."""
        return len(self.loss_mask) - 1 - list(reversed(self.loss_mask)).index(1)

    def check(self) -> None:
        """Raises: TrajectoryError when there is nothing to train on or to predict from."""
        if 1 not in self.loss_mask:
            raise TrajectoryError("a sequence without sampled tokens cannot be trained on; leave it out")
        if self.prompt_length == 0:
            raise TrajectoryError("the first token of a sequence has nothing to be predicted from; start with a prompt")


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that attend alike: to a shared prefix `[prefix_start, +prefix_length)` whole, to their own causally.

    `rows` [B, L] are positions in the pack, padded with the row's first; `valid` [n] indexes the flattened `rows`
    that are real, `flat` [n] the pack positions they stand for.
    """

    rows: Tensor
    valid: Tensor
    flat: Tensor
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward's input. Shapes: tokens, positions [N]; targets M: `rows` [M] predict `targets` [M].

    `owner` [M] is the index of the sequence among those packed, `index` [M] the target's position in it.
    `routes` [N, L, K] holds recorded experts, −1 where none.
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


@dataclass(slots=True)
class _Tree:
    prompt: tuple[int, ...]
    members: list[int] = field(default_factory=list)
    tokens: int = 0


def build_packs(sequences: Sequence[TrainSequence], *, token_budget: int) -> list[Pack]:
    """Arrange all sequences into packs of at most `token_budget` computed tokens (a longer sequence packs alone).

    Raises: TrajectoryError for a sequence that cannot be trained on.
    """
    for sequence in sequences:
        sequence.check()
    packs: list[Pack] = []
    current: list[_Tree] = []
    used = 0
    for tree in _plant(sequences, token_budget):
        if current and used + tree.tokens > token_budget:
            packs.append(_flatten(current, sequences))
            current, used = [], 0
        current.append(tree)
        used += tree.tokens
    if current:
        packs.append(_flatten(current, sequences))
    return packs


def _plant(sequences: Sequence[TrainSequence], token_budget: int) -> list[_Tree]:
    clusters: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for number, sequence in enumerate(sequences):
        prompt = tuple(sequence.token_ids[: sequence.prompt_length])
        clusters.setdefault((sequence.group, prompt), []).append(number)
    trees: list[_Tree] = []
    for (_, prompt), members in clusters.items():
        lengths = [sequences[number].input_length - len(prompt) for number in members]
        # Evenly filled trees when a cluster does not fit one pack: each repeats the prompt.
        room = max(1, token_budget - len(prompt))
        share = sum(lengths) / max(1, -(-sum(lengths) // room))
        tree = _Tree(prompt, tokens=len(prompt))
        for number, length in zip(members, lengths, strict=True):
            grown = tree.tokens - len(prompt) + length
            if tree.members and (grown > room or grown - length >= share):
                trees.append(tree)
                tree = _Tree(prompt, tokens=len(prompt))
            tree.members.append(number)
            tree.tokens += length
        trees.append(tree)
    return trees


class _Flattener:
    """Collects the flat layout of one pack."""

    def __init__(self, sequences: Sequence[TrainSequence]) -> None:
        self.sequences = sequences
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.routes: list[tuple[int, Tensor | None, int, int]] = []  # pack row, routes, start, end
        self.rows: list[int] = []
        self.targets: list[tuple[int, float, int, int]] = []
        self.singles: list[tuple[int, int]] = []
        self.pieces: list[Piece] = []

    def append(self, number: int, start: int, end: int) -> int:
        """Add tokens `[start, end)` of a sequence; return the pack row of the first."""
        row = len(self.tokens)
        sequence = self.sequences[number]
        self.tokens.extend(sequence.token_ids[start:end])
        self.positions.extend(range(start, end))
        self.routes.append((row, sequence.routes, start, end))
        return row

    def aim(self, number: int, *, prompt_row: int, branch_row: int) -> None:
        """Add the targets of a sequence whose prompt and branch start at the given rows."""
        sequence = self.sequences[number]
        prompt = sequence.prompt_length
        for index in range(prompt, sequence.input_length + 1):
            if sequence.loss_mask[index]:
                source = index - 1
                row = prompt_row + source if source < prompt else branch_row + source - prompt
                self.rows.append(row)
                self.targets.append((sequence.token_ids[index], sequence.temperature, number, index))

    def add(self, tree: _Tree) -> None:
        """Lay one tree out."""
        length = len(tree.prompt)
        start = self.append(tree.members[0], 0, length)
        branches = []
        for number in tree.members:
            end = self.sequences[number].input_length
            row = self.append(number, length, end)
            branches.append((row, end - length))
            self.aim(number, prompt_row=start, branch_row=row)
        if len(branches) == 1:
            self.singles.append((start, length + branches[0][1]))
            return
        self.pieces.append(_piece([(start, length)]))
        grown = [branch for branch in branches if branch[1]]
        if grown:
            self.pieces.append(_piece(grown, prefix=(start, length)))

    def finish(self) -> Pack:
        """The pack."""
        if self.singles:
            self.pieces.append(_piece(self.singles))
        targets, temperatures, owner, index = zip(*self.targets, strict=True)
        return Pack(
            tokens=torch.tensor(self.tokens),
            positions=torch.tensor(self.positions),
            pieces=tuple(self.pieces),
            rows=torch.tensor(self.rows),
            targets=torch.tensor(targets),
            temperatures=torch.tensor(temperatures, dtype=torch.float32),
            owner=torch.tensor(owner),
            index=torch.tensor(index),
            routes=self._routes(),
            sequences=tuple(dict.fromkeys(owner)),
        )

    def _routes(self) -> Tensor | None:
        recorded = [routes for _, routes, _, _ in self.routes if routes is not None]
        if not recorded:
            return None
        out = torch.full((len(self.tokens), *recorded[0].shape[1:]), -1, dtype=torch.int64)
        for row, routes, start, end in self.routes:
            if routes is None:
                continue
            part = routes[start : min(end, routes.shape[0])]
            out[row : row + part.shape[0]] = part
        return out


def _flatten(trees: list[_Tree], sequences: Sequence[TrainSequence]) -> Pack:
    flattener = _Flattener(sequences)
    for tree in trees:
        flattener.add(tree)
    return flattener.finish()


def _piece(spans: list[tuple[int, int]], *, prefix: tuple[int, int] = (0, 0)) -> Piece:
    width = max(length for _, length in spans)
    steps = torch.arange(width)
    starts = torch.tensor([start for start, _ in spans])[:, None]
    lengths = torch.tensor([length for _, length in spans])[:, None]
    real = steps[None, :] < lengths
    rows = torch.where(real, starts + steps[None, :], starts)
    valid = real.flatten().nonzero().squeeze(1)
    return Piece(rows, valid, rows.flatten()[valid], *prefix)
