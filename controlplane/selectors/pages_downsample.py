"""Fewer points, the same shape: what keeps charts quick however long a run is."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]
MAX_POINTS = 2000


def lttb(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` of the points, first and last among them, by largest triangles.

    Source: Steinarsson 2013, "Downsampling Time Series for Visual Representation", Largest-Triangle-Three-Buckets.
    Raises: ValueError for a limit below 3.
    """
    if limit < 3:
        raise ValueError(f"limit must be at least 3, not {limit}")
    count = len(points)
    if count <= limit:
        return list(points)
    width = (count - 2) / (limit - 2)
    kept = [points[0]]
    for bucket in range(limit - 2):
        start, end = int(bucket * width) + 1, int((bucket + 1) * width) + 1
        following = points[end : min(int((bucket + 2) * width) + 1, count)] or [points[-1]]
        kept.append(_farthest(kept[-1], points[start:end], _mean(following)))
    kept.append(points[-1])
    return kept


def _mean(points: Sequence[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _farthest(left: Point, candidates: Sequence[Point], right: Point) -> Point:
    """The candidate that spans the largest triangle between its neighbours."""
    return max(
        candidates,
        key=lambda point: abs(
            (left[0] - right[0]) * (point[1] - left[1]) - (left[0] - point[0]) * (right[1] - left[1])
        ),
    )
