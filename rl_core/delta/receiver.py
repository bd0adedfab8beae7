"""A replica brings its weights to a target: fetch, verify base and digests, apply, verify the new root.

Nothing is applied before every byte of a hop is fetched and its digests match. A hop that fails on the way is taken
back; where even that does not give the old root again, the shadow is `poisoned` and the next reconcile repairs it
from a snapshot. After a failure in the middle of a chain the shadow stands at the last version that was verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

import structlog
import torch
import xxhash
from blake3 import blake3

from rl_core.delta.apply import HopApplication
from rl_core.delta.manifest import Segment
from rl_core.delta.path import Hop, HopKind, Target, plan_path
from rl_core.delta.shadow import ShadowWeights
from rl_core.errors import BaseMismatch, DigestMismatch
from rl_core.store import ObjectStore

_log = structlog.get_logger(__name__)


class ReconcilePhase(StrEnum):
    """What a reconcile is at."""

    FETCH = "fetch"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Progress:
    """`hop` counts from 1 to `hops`; bytes are those fetched, of the whole path."""

    phase: ReconcilePhase
    hop: int
    hops: int
    bytes_done: int
    bytes_total: int


@dataclass(slots=True)
class Reconciled:
    """What a reconcile did. `changed` holds the shadow's own tensors, in place until the next reconcile: copy to keep.

    `changed` also lists what an earlier reconcile that failed had already moved. Times are wall seconds; fetching
    overlaps decoding of snapshots, so they need not add up to the whole.
    """

    changed: dict[str, torch.Tensor]
    root: str
    version: str
    removed: tuple[str, ...] = ()
    hops: list[Hop] = field(default_factory=list)
    bytes_fetched: int = 0
    fetch_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0


def reconcile(
    store: ObjectStore,
    shadow: ShadowWeights,
    target: Target,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    threads: int = 1,
) -> Reconciled:
    """Bring `shadow` to `target` by the cheapest path and report which tensors changed.

    Raises: BaseMismatch (no path, or a base that is not these weights), DigestMismatch (retryable: bytes arrived
    damaged), ManifestError, ObjectMissing, StoreUnavailable. The shadow then stands at a verified version, or is
    `poisoned`.
    """
    path = plan_path(store, shadow, target)
    result = Reconciled(changed={}, root=target.root, version=target.version, hops=path)
    before = set(shadow.tensors)
    total = sum(hop.bytes for hop in path)
    for number, hop in enumerate(path, 1):

        def report(phase: ReconcilePhase, *, number: int = number) -> None:
            if on_progress is not None:
                on_progress(Progress(phase, number, len(path), result.bytes_fetched, total))

        _take_hop(store, shadow, hop, result=result, report=report, threads=threads)
    if shadow.root != target.root:
        raise BaseMismatch(f"the path to {target.version} ended at another root; ask for the target again")
    shadow.version, shadow.manifest_key = target.version, target.manifest
    result.changed = {name: shadow.tensors[name] for name in sorted(shadow.unreported) if name in shadow.tensors}
    result.removed = tuple(sorted(before - set(shadow.tensors)))
    shadow.unreported.clear()
    if path:
        _log.info(
            "weights_reconciled",
            version=target.version,
            hops=len(path),
            bytes_fetched=result.bytes_fetched,
            changed_tensors=len(result.changed),
            fetch_s=round(result.fetch_s, 3),
            decode_s=round(result.decode_s, 3),
            verify_s=round(result.verify_s, 3),
        )
    return result


def _take_hop(
    store: ObjectStore,
    shadow: ShadowWeights,
    hop: Hop,
    *,
    result: Reconciled,
    report: Callable[[ReconcilePhase], None],
    threads: int,
) -> None:
    application = HopApplication(shadow, hop, threads=threads)
    report(ReconcilePhase.FETCH)
    segments = _fetched(store, hop.manifest.segments, result=result, report=report)
    # A patch is small and is applied in place, so all of it is here and checked first. A snapshot is large and is
    # built beside the shadow, so its segments pass through one by one.
    batches: Iterable[list[tuple[int, bytes]]] = (
        ([pair] for pair in segments) if hop.kind is HopKind.SNAPSHOT else [list(segments)]
    )
    with application:
        for batch in batches:
            checked = time.perf_counter()
            payloads = {
                index: memoryview(data)[frame.offset : frame.offset + frame.size]
                for number, data in batch
                for index, frame in enumerate(hop.manifest.frames)
                if frame.segment == number
            }
            for index, payload in payloads.items():
                if xxhash.xxh3_64_hexdigest(payload) != hop.manifest.frames[index].xxh3:
                    raise DigestMismatch(f"a frame of {hop.manifest_key} is not what its digest says; fetch it again")
            decoding = time.perf_counter()
            result.verify_s += decoding - checked
            report(ReconcilePhase.DECODE)
            application.apply(payloads)
            result.decode_s += time.perf_counter() - decoding
        verifying = time.perf_counter()
        report(ReconcilePhase.VERIFY)
        application.commit()
        result.verify_s += time.perf_counter() - verifying


def _fetched(
    store: ObjectStore,
    segments: list[Segment],
    *,
    result: Reconciled,
    report: Callable[[ReconcilePhase], None],
) -> Iterator[tuple[int, bytes]]:
    """Segments in order, verified, the next one on its way while one is worked on."""

    def fetch(segment: Segment) -> tuple[bytes, float]:
        started = time.perf_counter()
        data = store.get(segment.key)
        if len(data) != segment.size or blake3(data).hexdigest() != segment.blake3:
            raise DigestMismatch(f"{segment.key} is not what its manifest says; fetch it again or restore it")
        return data, time.perf_counter() - started

    if not segments:
        return
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(fetch, segments[0])
        for number, segment in enumerate(segments):
            data, seconds = coming.result()
            if number + 1 < len(segments):
                coming = pool.submit(fetch, segments[number + 1])
            result.fetch_s += seconds
            result.bytes_fetched += segment.size
            report(ReconcilePhase.FETCH)
            yield number, data
