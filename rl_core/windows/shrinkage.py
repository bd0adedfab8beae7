"""Means of groups, pulled towards everybody's by how little is known of each.

With n values a group, variance σ² within groups and τ² between their means, the best linear estimate of a group's mean
is `μ + Z (its own mean − μ)` with Z = n τ² / (n τ² + σ²).
Source: Bühlmann & Straub 1970, "Glaubwürdigkeit für Schadensätze", with equal weights; Morris 1983, "Parametric
Empirical Bayes Inference" (JASA 78), for the same as empirical Bayes; groups of one size give the positive-part
estimator of James & Stein 1961. σ² and τ² are the moment estimators of the one-way analysis of variance, τ² cut at 0.
Ours shrinks all the way while σ² rests on fewer than `MIN_DEGREES` degrees of freedom.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_DEGREES = 10
UNKNOWN = ""  # the group of what belongs to none: it has no offset, and tells nothing of the others


@dataclass(frozen=True, slots=True)
class Components:
    """Variance `within` groups (σ²) and `between` their true means (τ²)."""

    within: float
    between: float

    def credibility(self, n: int) -> float:
        """Z of a group of which n values are known, in [0, 1]."""
        signal = n * self.between
        return signal / (signal + self.within) if signal > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over groups: of one, or of several added up, from which one can be taken away again.

    `squares` are the squared deviations from own means, `means` the sum of total² / count.
    """

    groups: int = 0
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    means: float = 0.0
    squared_counts: int = 0

    def plus(self, other: Moments, sign: int = 1) -> Moments:
        """These and other groups, or with sign −1 these without others that are among them."""
        return Moments(
            self.groups + sign * other.groups,
            self.count + sign * other.count,
            self.total + sign * other.total,
            self.squares + sign * other.squares,
            self.means + sign * other.means,
            self.squared_counts + sign * other.squared_counts,
        )

    @property
    def mean(self) -> float:
        """Of all values."""
        return self.total / self.count

    def components(self) -> Components:
        """σ² and τ² of these groups."""
        degrees = self.count - self.groups
        if degrees < MIN_DEGREES or self.groups < 2:
            return Components(within=0.0, between=0.0)
        within = max(0.0, self.squares) / degrees
        spread = self.means - self.total**2 / self.count
        size = self.count - self.squared_counts / self.count
        return Components(within=within, between=max(0.0, (spread - (self.groups - 1) * within) / size))


def group_moments(values: Sequence[float], groups: Sequence[str]) -> dict[str, Moments]:
    """Those of each group. Shapes: [B] each."""
    members: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if group != UNKNOWN:
            members.setdefault(group, []).append(value)
    return {group: _moments(own) for group, own in members.items()}


def _moments(values: Sequence[float]) -> Moments:
    count, total = len(values), sum(values)
    squares = sum((value - total / count) ** 2 for value in values)
    return Moments(1, count, total, squares, total**2 / count, count**2)


def all_moments(groups: Iterable[Moments]) -> Moments:
    """Those of all groups together."""
    return functools.reduce(Moments.plus, groups, Moments())


def variance_components(values: Sequence[float], groups: Sequence[str]) -> Components:
    """σ² and τ² of values in groups. Shapes: [B] each."""
    return all_moments(group_moments(values, groups).values()).components()


def group_offsets(values: Sequence[float], groups: Sequence[str]) -> dict[str, float]:
    """Each group's shrunken distance from `values`' origin; give values centred on everybody's mean."""
    moments = group_moments(values, groups)
    components = all_moments(moments.values()).components()
    return {group: components.credibility(own.count) * own.mean for group, own in moments.items()}


def others_offsets(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """For each value the shrunken distance of its group's others: a baseline that does not know the value itself.

    A value without others has 0. Shapes: [B] each → [B].
    """
    moments = group_moments(values, groups)
    components = all_moments(moments.values()).components()
    offsets = []
    for value, group in zip(values, groups, strict=True):
        own = moments.get(group)
        others = own.count - 1 if own else 0
        mean = (own.total - value) / others if own and others else 0.0
        offsets.append(components.credibility(others) * mean)
    return offsets
