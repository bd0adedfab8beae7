"""A replica brings its weights to a target: fetch, decode, verify, as one pipeline with bounded memory.

While a segment arrives, the one before it is decoded into the shadow, and tensors that nothing more will touch are
hashed. A hop that fails on the way is taken back; where that does not give the old root again, the shadow is
`poisoned`. Where bytes of a hop are gone or damaged and another path leads to the target, that one is taken; a poisoned
shadow begins from a snapshot. After a failure in the middle of a chain the shadow stands at the last version that was
verified. It is apart from what serves: nothing that is half-applied is ever served.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import structlog
import torch

from rl_core.delta.apply import HopApplication, payloads_of
from rl_core.delta.early import EarlyHop
from rl_core.delta.fetch import Origin, SegmentSource
from rl_core.delta.path import Hop, Target, plan_path
from rl_core.delta.shadow import ShadowWeights
from rl_core.errors import BaseMismatch, DigestMismatch, ManifestError, ObjectMissing, RlCoreError
from rl_core.store import ObjectStore

_MOST_FAULTS: Final = 2  # damaged bytes are read once more; then another path is looked for

_log = structlog.get_logger(__name__)


class ReconcilePhase(StrEnum):
    """What a reconcile is at."""

    FETCH = "fetch"  # segments arrive, and those that have arrived are decoded
    DECODE = "decode"  # all of a hop is here
    VERIFY = "verify"  # everything is decoded; the root is computed


@dataclass(frozen=True, slots=True)
class Progress:
    """`hop` counts from 1 to `hops`; bytes are those that are here, of the whole path. Told from several threads."""

    phase: ReconcilePhase
    hop: int
    hops: int
    bytes_done: int
    bytes_total: int


@dataclass(slots=True)
class Reconciled:
    """What a reconcile did. `changed` holds the shadow's own tensors, in place until the next reconcile: copy to keep.

    `changed` also lists what an earlier reconcile that failed had already moved. `bytes_fetched` came from the store or
    from peers, of it `bytes_from_peers`, in this update or ahead of it; `bytes_from_spool` were on the disk already.
    Times are wall seconds, those ahead of the update too; the parts overlap, so they need not add up to the whole:
    `store_s` is what of `fetch_s` went to reading the store, `verify_s` what was waited for after the last frame.
    """

    changed: dict[str, torch.Tensor]
    root: str
    version: str
    removed: tuple[str, ...] = ()
    hops: list[Hop] = field(default_factory=list)
    bytes_fetched: int = 0
    bytes_from_peers: int = 0
    bytes_from_spool: int = 0
    fetch_s: float = 0.0
    store_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0


def reconcile(
    store: ObjectStore,
    shadow: ShadowWeights,
    target: Target,
    *,
    source: SegmentSource | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    threads: int = 1,
    early: EarlyHop | None = None,
) -> Reconciled:
    """Bring `shadow` to `target` by the cheapest path and report which tensors changed.

    Manifests are read from `store`, segments through `source` (by default from the store, spooling nothing). `threads`
    decode, and as many hash. `early` is what was decoded before there was a target: where the path begins with it, the
    update goes on from there, else it is taken back first.
    Raises: BaseMismatch (no path, or a base that is not these weights), DigestMismatch (retryable: bytes arrived
    damaged), ManifestError, ObjectMissing, StoreUnavailable, Interrupted. The shadow then stands at a verified version,
    or is `poisoned`.
    """
    result = Reconciled(changed={}, root=target.root, version=target.version)
    before = set(shadow.tensors)
    source = source or SegmentSource(store)
    meter = _Meter(on_progress)
    faults: Counter[str] = Counter()
    path, early = _first_path(store, shadow, target, early)
    while path:
        meter.begin(path)
        try:
            for hop in path:
                meter.hop += 1
                begun, early = early, None
                _take_hop(source, shadow, hop, result=result, meter=meter, threads=threads, early=begun)
                result.hops.append(hop)
            break
        except (ObjectMissing, DigestMismatch) as error:
            _log.warning("hop_failed", version=target.version, manifest=hop.manifest_key, error=str(error))
            faults[hop.manifest_key] += 1 if isinstance(error, DigestMismatch) else _MOST_FAULTS
            path = _another_path(store, shadow, target, faults, after=error)
    if shadow.root != target.root:
        raise BaseMismatch(f"the path to {target.version} ended at another root; ask for the target again")
    shadow.version, shadow.manifest_key = target.version, target.manifest
    result.changed = {name: shadow.tensors[name] for name in sorted(shadow.unreported) if name in shadow.tensors}
    result.removed = tuple(sorted(before - set(shadow.tensors)))
    shadow.unreported.clear()
    if result.hops:
        _log.info(
            "weights_reconciled",
            version=target.version,
            hops=len(result.hops),
            bytes_fetched=result.bytes_fetched,
            bytes_from_peers=result.bytes_from_peers,
            bytes_from_spool=result.bytes_from_spool,
            changed_tensors=len(result.changed),
            fetch_s=round(result.fetch_s, 3),
            decode_s=round(result.decode_s, 3),
            verify_s=round(result.verify_s, 3),
        )
    return result


class _Meter:
    """Counts what arrives and tells of it."""

    def __init__(self, tell: Callable[[Progress], None] | None) -> None:
        self._tell = tell
        self._hops = self._total = self._done = self.hop = 0
        self._lock = threading.Lock()

    def begin(self, path: list[Hop]) -> None:
        with self._lock:
            self._hops, self._total = len(path), sum(hop.bytes for hop in path)
            self._done = self.hop = 0

    def arrived(self, count: int) -> None:
        with self._lock:
            self._done += count
        self.at(ReconcilePhase.FETCH)

    def at(self, phase: ReconcilePhase) -> None:
        if self._tell is not None:
            self._tell(Progress(phase, self.hop, self._hops, self._done, self._total))


def _first_path(
    store: ObjectStore, shadow: ShadowWeights, target: Target, early: EarlyHop | None
) -> tuple[list[Hop], EarlyHop | None]:
    """The path, and what is decoded of its first hop. Raises: as `plan_path`; what was decoded is taken back then."""
    if early is None:
        return plan_path(store, shadow, target), None
    with ExitStack() as unless_used:
        unless_used.callback(early.close)
        path = plan_path(store, early.stands_at, target)
        if path and early.leads_into(path[0]):
            unless_used.pop_all()
            return path, early
    if shadow.damaged:
        raise DigestMismatch("the weights held changed in memory by themselves; whoever owns the machine should know")
    return (plan_path(store, shadow, target) if shadow.poisoned else path), None


def _another_path(
    store: ObjectStore, shadow: ShadowWeights, target: Target, faults: Counter[str], *, after: RlCoreError
) -> list[Hop]:
    """A path without the manifests whose bytes failed too often.

    Raises: `after` when there is none, or when the shadow is damaged: somebody has to know of that.
    """
    if shadow.damaged:
        raise after
    without = {key for key, count in faults.items() if count >= _MOST_FAULTS}
    try:
        return plan_path(store, shadow, target, without=without)
    except (BaseMismatch, ManifestError, ObjectMissing) as error:
        _log.warning("no_other_path", version=target.version, error=str(error))
        raise after from None


def _take_hop(
    source: SegmentSource,
    shadow: ShadowWeights,
    hop: Hop,
    *,
    result: Reconciled,
    meter: _Meter,
    threads: int,
    early: EarlyHop | None,
) -> None:
    manifest, done = hop.manifest, 0
    with ExitStack() as stack:
        if early is not None:
            stack.push(early.application)
        meter.at(ReconcilePhase.FETCH)
        frames_in: defaultdict[int, list[int]] = defaultdict(list)
        for index, frame in enumerate(manifest.frames):
            frames_in[frame.segment].append(index)
        if early is None:
            application = stack.enter_context(HopApplication(shadow, hop, threads=threads))
        else:
            application, done = early.application, len(early.segments)
            application.complete(hop)
            result.decode_s += early.decode_s
            for segment in early.segments:
                meter.arrived(segment.size)
                _count(segment.size, *source.brought(segment), result=result)
        for fetched in source.stream(manifest.segments, on_bytes=meter.arrived, first=done):
            _count(fetched.data.nbytes, fetched.origin, fetched.seconds, result=result)
            decoding = time.perf_counter()
            if fetched.number + 1 == len(manifest.segments):
                meter.at(ReconcilePhase.DECODE)
            payloads = payloads_of(manifest, frames_in[fetched.number], fetched.data)
            application.apply(payloads, resident=fetched.resident)
            del fetched, payloads  # or they would be held while more arrives
            result.decode_s += time.perf_counter() - decoding
        verifying = time.perf_counter()
        meter.at(ReconcilePhase.VERIFY)
        application.commit()
        result.verify_s += time.perf_counter() - verifying


def _count(size: int, origin: Origin, seconds: float, *, result: Reconciled) -> None:
    result.fetch_s += seconds
    if origin is Origin.SPOOL:
        result.bytes_from_spool += size
    else:
        result.bytes_fetched += size
        result.bytes_from_peers += size if origin is Origin.PEER else 0
        result.store_s += seconds if origin is Origin.STORE else 0.0
