"""How to get from the weights at hand to a target: forwards, backwards, or from a snapshot; whatever moves least."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from rl_core.delta.manifest import Base, Manifest, ManifestKind, read_manifest
from rl_core.delta.shadow import ShadowWeights
from rl_core.errors import BaseMismatch, ManifestError, ObjectMissing
from rl_core.store import ObjectStore
from rl_core.types import VersionRef

MAX_HOPS: Final = 256  # a longer chain is a fault of publishing: a snapshot should have come first


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the control plane wants a replica to hold. `version` is the text form, `root` 64 hex digits.

    `manifest` is the key of a manifest of this root, which may name it for another version: a lineage begins with the
    weights of another. `snapshot` is the key of a snapshot of it or of an ancestor, if any.
    """

    version: str
    root: str
    manifest: str
    snapshot: str | None = None

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


def plan_path(store: ObjectStore, shadow: ShadowWeights, target: Target) -> list[Hop]:
    """The cheapest list of hops from the shadow to the target, by bytes; empty when the roots are equal already.

    Raises: ManifestError when a manifest is damaged or of another root; BaseMismatch when nothing leads from
    these weights to the target; ObjectMissing when the target's manifest is gone.
    """
    if shadow.root == target.root and not shadow.poisoned:
        return []
    chain = _Ancestry(store, target.manifest, root=target.root)
    if not chain.extend():
        raise ObjectMissing(f"{target.manifest} is gone; ask the control plane for the target again")
    deltas = None if shadow.poisoned else _by_deltas(store, chain, shadow)
    whole = _by_snapshot(store, chain, target, cheaper_than=None if deltas is None else _cost(deltas))
    path = whole if deltas is None or (whole is not None and _cost(whole) < _cost(deltas)) else deltas
    if path is None:
        raise BaseMismatch(
            f"no path leads from the weights at hand ({shadow.version or 'unknown version'}, root {shadow.root[:16]}…"
            f"{', damaged' if shadow.poisoned else ''}) to {target.version}: they are not on its chain and no snapshot "
            "is reachable; publish a snapshot of the target and name it in the target"
        )
    return path


def _cost(path: list[Hop]) -> int:
    return sum(hop.bytes for hop in path)


class _Ancestry:
    """Manifests from one along their bases, read only as far as somebody asks.

    `depths` says for each root met how many deltas lie between it and the start.
    """

    def __init__(self, store: ObjectStore, key: str | None, *, root: str) -> None:
        self._store = store
        self._next = key
        self._expected_root = root
        self.manifests: list[tuple[str, Manifest]] = []
        self.depths: dict[str, int] = {}

    def extend(self, *, reversible_only: bool = False) -> bool:
        """Read one manifest more; False at the end (a snapshot, an unpublished base, collected garbage).

        Raises: ManifestError when a manifest is not of the root that was named.
        """
        if self._next is None or len(self.manifests) >= MAX_HOPS:
            return False
        key = self._next
        try:
            manifest = read_manifest(self._store, key)
        except ObjectMissing:
            self._next = None
            return False
        if manifest.root != self._expected_root:
            raise ManifestError(
                f"{key} describes {manifest.version} with root {manifest.root[:16]}…, where root "
                f"{self._expected_root[:16]}… was named; ask the control plane for the target again"
            )
        if reversible_only and not manifest.reversible:
            self._next = None
            return False
        self.depths.setdefault(manifest.root, len(self.manifests))
        self.manifests.append((key, manifest))
        self._next = manifest.base.manifest if manifest.base else None
        if manifest.base is not None:
            self._expected_root = manifest.base.root
            self.depths.setdefault(manifest.base.root, len(self.manifests))
        return True

    def forward_from(self, root: str) -> list[Hop]:
        """The deltas from `root`, which is in `depths`, to the start."""
        return [
            Hop(
                kind=HopKind.FORWARD,
                manifest_key=key,
                manifest=manifest,
                leads_to=Base(manifest.version, manifest.root, key),
            )
            for key, manifest in reversed(self.manifests[: self.depths[root]])
        ]

    def backward_to(self, root: str) -> list[Hop]:
        """The deltas to take back from the start to `root`, which is in `depths`."""
        return [
            Hop(kind=HopKind.BACKWARD, manifest_key=key, manifest=manifest, leads_to=manifest.base)
            for key, manifest in self.manifests[: self.depths[root]]
            if manifest.base is not None
        ]


def _by_deltas(store: ObjectStore, chain: _Ancestry, shadow: ShadowWeights) -> list[Hop] | None:
    """Back from the shadow, forwards to the target, over the nearest version that both descend from.

    Both ancestries are read in turn, so a step forward and a step back each cost one or two manifests.
    """
    back = _Ancestry(store, shadow.manifest_key, root=shadow.root)
    back.depths[shadow.root] = 0
    more_back = more_chain = True
    while True:
        common = [root for root in back.depths if root in chain.depths]
        if common:
            meeting = min(common, key=lambda root: back.depths[root])
            return back.backward_to(meeting) + chain.forward_from(meeting)
        if not (more_back or more_chain):
            return None
        more_chain = more_chain and chain.extend()
        try:
            more_back = more_back and back.extend(reversible_only=True)
        except ManifestError:
            more_back = False  # the way back is damaged, or another's; a snapshot may still lead there


def _by_snapshot(store: ObjectStore, chain: _Ancestry, target: Target, *, cheaper_than: int | None) -> list[Hop] | None:
    """The named snapshot, else the one that the chain ends in, then deltas; None if there is none (or none cheaper)."""
    if target.snapshot is not None:
        found = _read_snapshot(store, target.snapshot)
        if found is not None:
            if cheaper_than is not None and found.bytes >= cheaper_than:
                return None
            while found.leads_to.root not in chain.depths and chain.extend():
                pass
            if found.leads_to.root in chain.depths:
                return [found, *chain.forward_from(found.leads_to.root)]
    if cheaper_than is not None:
        return None  # deltas lead there, and the chain's end lies behind the place where they start
    while chain.extend():
        pass
    key, last = chain.manifests[-1]
    if last.kind is not ManifestKind.SNAPSHOT:
        return None
    return [_snapshot_hop(key, last), *chain.forward_from(last.root)]


def _read_snapshot(store: ObjectStore, key: str) -> Hop | None:
    try:
        manifest = read_manifest(store, key)
    except ObjectMissing:
        return None
    return _snapshot_hop(key, manifest) if manifest.kind is ManifestKind.SNAPSHOT else None


def _snapshot_hop(key: str, manifest: Manifest) -> Hop:
    after = Base(manifest.version, manifest.root, key)
    return Hop(kind=HopKind.SNAPSHOT, manifest_key=key, manifest=manifest, leads_to=after)
