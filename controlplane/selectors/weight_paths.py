"""How weights are reached from nothing: a snapshot, then deltas, whatever moves the fewest bytes.

Weights are named by their roots; a publication leads from its base's root, or from nothing, to its own.
"""

from __future__ import annotations

import heapq
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.models import Publication

NOTHING: Final = ""  # the root of who holds no weights


@dataclass(frozen=True, slots=True)
class Edge:
    """A publication as paths need it. `base_root` is NOTHING for a snapshot."""

    publication: uuid.UUID
    root: str
    base_root: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Reached:
    """The edges that weights are best reached by from nothing, by root. A root that is missing is not reached."""

    last: Mapping[str, Edge]

    def path(self, root: str) -> list[Edge]:
        """The edges from a snapshot to `root`, in order. Raises: KeyError when nothing leads there."""
        path: list[Edge] = []
        while root != NOTHING:
            path.append(self.last[root])
            root = path[-1].base_root
        return path[::-1]


def edge_of(row: Publication) -> Edge:
    """A published row as an edge. A row whose size is not known costs what the whole weights do."""
    return Edge(row.pk, row.root, row.base_root, row.bytes if row.bytes is not None else row.full_bytes or 1)


def reach(edges: Iterable[Edge]) -> Reached:
    """The cheapest way from nothing to every root that can be reached, by bytes (Dijkstra)."""
    leaving: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        leaving[edge.base_root].append(edge)
    cost = {NOTHING: 0}
    last: dict[str, Edge] = {}
    queue = [(0, NOTHING)]
    done: set[str] = set()
    while queue:
        so_far, root = heapq.heappop(queue)
        if root in done:
            continue
        done.add(root)
        for edge in leaving[root]:
            total = so_far + edge.bytes
            if edge.root not in done and total < cost.get(edge.root, total + 1):
                cost[edge.root], last[edge.root] = total, edge
                heapq.heappush(queue, (total, edge.root))
    return Reached(last)


def kept_edges(edges: Iterable[Edge], *, needed: Iterable[str]) -> tuple[set[uuid.UUID], set[str]]:
    """The publications to keep so that every needed root stays in reach, and the needed roots that are not.

    Kept are the cheapest ways from nothing, and whatever leads from one needed root to another: the short ways of
    readers that hold a version already.
    """
    rows, wanted = list(edges), set(needed)
    reached = reach(rows)
    lost = {root for root in wanted if root not in reached.last}
    kept = {edge.publication for root in wanted - lost for edge in reached.path(root)}
    kept |= {edge.publication for edge in rows if edge.root in wanted and edge.base_root in wanted}
    return kept, lost
