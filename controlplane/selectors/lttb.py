"""Largest-Triangle-Three-Buckets: which points of a series to keep so that its drawing looks the same."""

from __future__ import annotations

from collections.abc import Sequence


def lttb(xs: Sequence[float], ys: Sequence[float], limit: int) -> list[int]:
    """Indices of at most `limit` points, ascending, the first and the last among them.

    Points between are cut into `limit - 2` buckets of equal count; from each the one is kept that spans the largest
    triangle with the point kept before it and the mean of the next bucket.

    Raises: ValueError for a limit below 3 or lists of different lengths.
    Source: Steinarsson 2013, "Downsampling Time Series for Visual Representation", section 4.2.
    """
    count = len(xs)
    if limit < 3 or len(ys) != count:
        raise ValueError(f"need a limit of at least 3 and as many y as x, not {limit}, {count} x, {len(ys)} y")
    if count <= limit:
        return list(range(count))
    width = (count - 2) / (limit - 2)
    edges = [1 + int(bucket * width) for bucket in range(limit - 2)] + [count - 1]
    kept = [0]
    for bucket in range(limit - 2):
        start, end = edges[bucket], edges[bucket + 1]
        after = edges[bucket + 2] if bucket + 2 < len(edges) else count
        x_next = sum(xs[end:after]) / (after - end)
        y_next = sum(ys[end:after]) / (after - end)
        x_last, y_last = xs[kept[-1]], ys[kept[-1]]
        best, best_area = start, -1.0
        for index in range(start, end):
            area = abs((x_last - x_next) * (ys[index] - y_last) - (x_last - xs[index]) * (y_next - y_last))
            if area > best_area:
                best, best_area = index, area
        kept.append(best)
    return [*kept, count - 1]
