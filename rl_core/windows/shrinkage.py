"""Means of groups, pulled towards everybody's by how little is known of each.

With n values a group, variance σ² within groups and τ² between their means, the best linear estimate of a group's mean
is `μ + Z (its own mean − μ)` with Z = n τ² / (n τ² + σ²).
Source: Bühlmann & Straub 1970, "Glaubwürdigkeit für Schadensätze", with equal weights; Morris 1983, "Parametric
Empirical Bayes Inference" (JASA 78), for the same as empirical Bayes; groups of one size give the positive-part
estimator of James & Stein 1961. σ² and τ² are the moment estimators of the one-way analysis of variance, τ² cut at 0.
Ours shrinks all the way while σ² rests on fewer than `MIN_DEGREES` degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(slots=True)
class _Sum:
    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count


def _sums(values: Sequence[float], groups: Sequence[str]) -> dict[str, _Sum]:
    sums: dict[str, _Sum] = {}
    for value, group in zip(values, groups, strict=True):
        if group != UNKNOWN:
            entry = sums.setdefault(group, _Sum())
            entry.count += 1
            entry.total += value
    return sums


def variance_components(values: Sequence[float], groups: Sequence[str]) -> Components:
    """σ² and τ² of values in groups. Shapes: [B] each."""
    sums = _sums(values, groups)
    n = sum(entry.count for entry in sums.values())
    degrees = n - len(sums)
    if degrees < MIN_DEGREES or len(sums) < 2:
        return Components(within=0.0, between=0.0)
    mean = sum(entry.total for entry in sums.values()) / n
    pairs = [(value, sums[group].mean) for value, group in zip(values, groups, strict=True) if group != UNKNOWN]
    within = sum((value - own) ** 2 for value, own in pairs) / degrees
    spread = sum(entry.count * (entry.mean - mean) ** 2 for entry in sums.values())
    size = n - sum(entry.count**2 for entry in sums.values()) / n
    return Components(within=within, between=max(0.0, (spread - (len(sums) - 1) * within) / size))


def group_offsets(values: Sequence[float], groups: Sequence[str]) -> dict[str, float]:
    """Each group's shrunken distance from `values`' origin; give values centred on everybody's mean."""
    components = variance_components(values, groups)
    return {group: components.credibility(s.count) * s.mean for group, s in _sums(values, groups).items()}


def others_offsets(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """For each value the shrunken distance of its group's others: a baseline that does not know the value itself.

    A value without others has 0. Shapes: [B] each → [B].
    """
    components = variance_components(values, groups)
    sums = _sums(values, groups)
    offsets = []
    for value, group in zip(values, groups, strict=True):
        entry = sums.get(group)
        others = entry.count - 1 if entry else 0
        mean = (entry.total - value) / others if entry and others else 0.0
        offsets.append(components.credibility(others) * mean)
    return offsets
