"""How to get from the weights at hand to a target: forwards, backwards, or from a snapshot; whatever moves least.

Manifests are edges between roots, and the cheapest path by bytes is looked for. They are read as they are needed: along
the target's bases, along those of the weights at hand, the skip-deltas and the snapshot that the target names.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection
from enum import StrEnum
from typing import Final

import msgspec
import structlog

from rl_core.delta.manifest import Base, Manifest, read_manifest
from rl_core.delta.shadow import ShadowWeights
from rl_core.errors import BaseMismatch, ManifestError, ObjectMissing
from rl_core.store import ObjectStore
from rl_core.types import VersionRef

MAX_HOPS: Final = 256  # a longer chain is a fault of publishing: a snapshot should have come first
_MAX_DELTAS: Final = 64

_log = structlog.get_logger(__name__)


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the control plane wants a replica to hold. `version` is the text form, `root` 64 hex digits.

    `manifest` is the key of a manifest of this root, which may name it for another version: a lineage begins with the
    weights of another. `snapshot` is the key of a snapshot of it or of an ancestor, if any; `deltas` are keys of
    further delta manifests that lead towards it (skip-deltas).
    """

    version: str
    root: str
    manifest: str
    snapshot: str | None = None
    deltas: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        VersionRef.parse(self.version)


class HopKind(StrEnum):
    """How a manifest is applied."""

    FORWARD = "forward"  # a delta from its base
    BACKWARD = "backward"  # a delta taken back, to its base
    SNAPSHOT = "snapshot"  # whole weights


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a path. `bytes` are its segments'; `leads_to` is what the weights are afterwards."""

    kind: HopKind
    manifest_key: str
    manifest: Manifest
    leads_to: Base

    @property
    def bytes(self) -> int:
        """Bytes to fetch."""
        return self.manifest.stored_bytes


class StandsAt(msgspec.Struct, frozen=True, kw_only=True):
    """Weights to plan from: what a shadow was before a hop was begun on it."""

    root: str
    version: str
    manifest_key: str | None
    poisoned: bool = False


def plan_path(
    store: ObjectStore, shadow: ShadowWeights | StandsAt, target: Target, *, without: Collection[str] = ()
) -> list[Hop]:
    """The cheapest list of hops from the shadow to the target, by bytes; empty when the roots are equal already.

    `without` are keys of manifests that are not to be applied: something of theirs is gone or damaged.
    Raises, where nothing leads to the target: ObjectMissing when its manifest is gone; ManifestError when a manifest is
    damaged or of another root; BaseMismatch when the manifests lead elsewhere.
    """
    if shadow.root == target.root and not shadow.poisoned:
        return []
    known = _Manifests(start=None if shadow.poisoned else shadow.root, end=target.root, without=without)
    chain = _Ancestry(store, target.manifest, root=target.root)
    back = _Ancestry(store, None if shadow.poisoned else shadow.manifest_key, root=shadow.root, reversible_only=True)
    chain.extend(known)
    if not known.one_delta_leads_there():
        back.extend(known)
    path = known.cheapest()
    if path is not None and known.one_delta_leads_there():
        return path
    _read_offers(store, target, known)
    path = known.cheapest()
    while True:
        # What is not read yet lies behind all that is, so it costs more than that.
        best = math.inf if path is None else _cost(path)
        extended = [side.extend(known) for side in (chain, back) if side.cost < best]
        if not any(extended):
            break
        path = known.cheapest()
    if path is not None:
        return path
    if chain.error is not None:
        raise chain.error
    if not chain.count:
        raise ObjectMissing(f"{target.manifest} is gone; ask the control plane for the target again")
    raise BaseMismatch(
        f"no path leads from the weights at hand ({shadow.version or 'unknown version'}, root {shadow.root[:16]}…"
        f"{', damaged' if shadow.poisoned else ''}) to {target.version}: they are not on its chain and no snapshot "
        "is reachable; publish a snapshot of the target and name it in the target"
    )


def _cost(path: list[Hop]) -> int:
    return sum(hop.bytes for hop in path)


def _read_offers(store: ObjectStore, target: Target, known: _Manifests) -> None:
    """Skip-deltas and the snapshot: offers, without any of which there may be a path still."""
    named = (target.snapshot,) if target.snapshot is not None else ()
    for key in (*named, *target.deltas[:_MAX_DELTAS]):
        try:
            known.add(key, read_manifest(store, key))
        except (ObjectMissing, ManifestError) as error:
            _log.warning("offered_manifest_unusable", key=key, error=str(error))


class _Manifests:
    """Those read so far, as edges between roots."""

    def __init__(self, *, start: str | None, end: str, without: Collection[str]) -> None:
        """`start` is the root at hand, None if there is none to start from; `without` are keys that make no edges."""
        self._start = start
        self._end = end
        self._without = without
        self._into: defaultdict[str, list[tuple[str, Hop]]] = defaultdict(list)
        self._snapshots: dict[str, Hop] = {}

    def add(self, key: str, manifest: Manifest) -> None:
        if key in self._without:
            return
        after = Base(manifest.version, manifest.root, key)
        if manifest.base is None:
            hop = Hop(kind=HopKind.SNAPSHOT, manifest_key=key, manifest=manifest, leads_to=after)
            self._snapshots.setdefault(manifest.root, hop)
            return
        hop = Hop(kind=HopKind.FORWARD, manifest_key=key, manifest=manifest, leads_to=after)
        self._into[manifest.root].append((manifest.base.root, hop))
        if manifest.reversible:
            hop = Hop(kind=HopKind.BACKWARD, manifest_key=key, manifest=manifest, leads_to=manifest.base)
            self._into[manifest.base.root].append((manifest.root, hop))

    def one_delta_leads_there(self) -> bool:
        return any(source == self._start for source, _ in self._into[self._end])

    def cheapest(self) -> list[Hop] | None:
        """The cheapest path from the start or from a snapshot to the end (Dijkstra, from the end backwards)."""
        cost: dict[str, int] = {self._end: 0}
        onward: dict[str, tuple[Hop, str]] = {}
        queue = [(0, self._end)]
        best: tuple[float, str, list[Hop]] = (math.inf, "", [])
        while queue:
            so_far, root = heapq.heappop(queue)
            if so_far > cost[root] or so_far >= best[0]:
                continue
            if root == self._start:
                best = (so_far, root, [])
            elif (snapshot := self._snapshots.get(root)) is not None and so_far + snapshot.bytes < best[0]:
                best = (so_far + snapshot.bytes, root, [snapshot])
            for source, hop in self._into[root]:
                if so_far + hop.bytes < cost.get(source, math.inf):
                    cost[source], onward[source] = so_far + hop.bytes, (hop, root)
                    heapq.heappush(queue, (cost[source], source))
        _, root, path = best
        if not root:
            return None
        while root != self._end:
            hop, root = onward[root]
            path.append(hop)
        return path


class _Ancestry:
    """Manifests from one along their bases, read only as far as somebody asks. `cost` is the bytes of `count` read."""

    def __init__(self, store: ObjectStore, key: str | None, *, root: str, reversible_only: bool = False) -> None:
        self._store = store
        self._next = key
        self._expected_root = root
        self._reversible_only = reversible_only
        self.count = 0
        self.cost = 0
        self.error: ManifestError | None = None

    def extend(self, known: _Manifests) -> bool:
        """Read one manifest more; False at the end (a snapshot, an unpublished base, collected garbage, damage)."""
        if self._next is None or self.count >= MAX_HOPS:
            return False
        key, self._next = self._next, None
        try:
            manifest = read_manifest(self._store, key)
            self._check(key, manifest)
        except ObjectMissing:
            return False
        except ManifestError as error:
            self.error = error  # another way may lead there
            return False
        if self._reversible_only and not manifest.reversible:
            return False
        known.add(key, manifest)
        self.count += 1
        self.cost += manifest.stored_bytes
        if manifest.base is not None:
            self._next, self._expected_root = manifest.base.manifest, manifest.base.root
        return True

    def _check(self, key: str, manifest: Manifest) -> None:
        if manifest.root != self._expected_root:
            raise ManifestError(
                f"{key} describes {manifest.version} with root {manifest.root[:16]}…, where root "
                f"{self._expected_root[:16]}… was named; ask the control plane for the target again"
            )
