"""One version on its way to every cluster, segment by segment: encode, upload, download, share, decode, verify, swap.

Each encoding host works through its own shard of the model. A segment goes up the trainer's link when it is encoded. A
cluster fetches it once, shares it among its replicas, decodes it and hashes the new weights; `Ahead` says how much of
that is done before the manifest is there. When all segments are verified its engines swap. Encoded segments wait in
bounded numbers on either side, but for those that a spool keeps on disk until the manifest comes. Units: seconds and
bytes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from benchmarks.fleet_events import Clock, Server, SharedLink

GBIT: Final = 1e9 / 8


class Ahead(IntEnum):
    """What a cluster does with a segment before the version is committed."""

    NOTHING = 0
    FETCH = 1  # brings it onto its disks, and to each replica
    DECODE = 2  # decodes it beside the weights that serve, and hashes what came out, too: what Slipway does


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a version travels. `ratio`: full ÷ shipped bytes; speeds are of model bytes, for one thread."""

    name: str
    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float
    segment_bytes: float = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """A group of equal hosts that work on one copy of the model."""

    hosts: int
    threads: int

    @property
    def workers(self) -> int:
        """Threads of all hosts."""
        return self.hosts * self.threads


@dataclass(frozen=True, kw_only=True)
class ClusterSite:
    """A cluster: its link to the store, the network inside it, and the hosts of each of its replicas.

    A download asks for `window_bytes` at once and waits for them before it asks for more; without a bound it waits for
    nothing.
    """

    name: str
    link_bytes_s: float
    rtt_s: float = 0.0
    window_bytes: float = math.inf
    replicas: int = 1
    lan_bytes_s: float = math.inf
    hosts: Hosts = Hosts(hosts=1, threads=1)


@dataclass(frozen=True, kw_only=True)
class Plant:
    """Everything but the format. `swap_s` is how long an engine stands still; `commit_s` is manifest and database.

    `ahead_segments` bounds the encoded segments that wait in each host's memory, at either end. An upload is begun
    `uplink_rtt_s` after the one before has ended: that long its answer takes.
    """

    model_bytes: float
    encoders: Hosts
    uplink_bytes_s: float
    clusters: tuple[ClusterSite, ...]
    uplink_rtt_s: float = 0.0
    hash_bytes_s: float = math.inf
    egress_bytes_s: float = math.inf
    commit_s: float = 0.0
    swap_s: float = 0.0
    ahead: Ahead = Ahead.DECODE
    ahead_segments: int = 64


@dataclass(frozen=True, kw_only=True)
class Synced:
    """What came of it. `published_s` and `serving_s` count from the end of the optimiser step.

    `busy_s` is how long links and cores worked; `most_waiting` the most segments that waited at once (on one encoding
    host, and in each cluster).
    """

    published_s: float
    serving_s: dict[str, float]
    uploaded_bytes: float
    downloaded_bytes: dict[str, float]
    egress_bytes: float
    segments: int
    busy_s: dict[str, float]
    most_waiting: dict[str, int]

    @property
    def sync_s(self) -> float:
        """From the end of the optimiser step until the last cluster serves the version."""
        return max(self.serving_s.values())


@dataclass(frozen=True)
class _Segment:
    size: float
    raw: float


def sync(plant: Plant, form: Format) -> Synced:
    """Carry one version to every cluster of the plant."""
    clock = Clock()
    egress = SharedLink(clock, plant.egress_bytes_s)
    clusters = [_Cluster(clock, egress, plant, site, form) for site in plant.clusters]
    trainer = _Trainer(clock, plant, form, clusters)
    trainer.start()
    clock.run()
    return Synced(
        published_s=trainer.published_s,
        serving_s={cluster.site.name: cluster.serving_s for cluster in clusters},
        uploaded_bytes=trainer.uploaded_bytes,
        downloaded_bytes={cluster.site.name: cluster.downloaded_bytes for cluster in clusters},
        egress_bytes=egress.sent,
        segments=trainer.segments,
        busy_s={"upload": trainer.uplink.busy_s, "encode": max(server.busy_s for server in trainer.cores)}
        | {f"cores {cluster.site.name}": cluster.cores.busy_s for cluster in clusters},
        most_waiting={"encoded": trainer.most_waiting}
        | {cluster.site.name: cluster.most_waiting for cluster in clusters},
    )


class _Trainer:
    """The hosts that encode, and the link that all of them share."""

    def __init__(self, clock: Clock, plant: Plant, form: Format, clusters: list[_Cluster]) -> None:
        self.cores = [Server(clock) for _ in range(plant.encoders.hosts)]
        self.uplink = Server(clock)
        self.uploaded_bytes = 0.0
        self.published_s = math.nan
        self.most_waiting = 0
        self._clock, self._plant, self._clusters = clock, plant, clusters
        self._todo = [deque(_cut(plant.model_bytes / plant.encoders.hosts, form)) for _ in self.cores]
        self.segments = sum(map(len, self._todo))
        self._waiting = [0] * len(self.cores)
        self._busy = [False] * len(self.cores)
        self._left = self.segments
        self._s_a_byte = (1 / form.encode_bytes_s + 1 / plant.hash_bytes_s) / plant.encoders.threads

    def start(self) -> None:
        for host in range(len(self.cores)):
            self._encode(host)

    def _encode(self, host: int) -> None:
        if self._busy[host] or not self._todo[host] or self._waiting[host] >= self._plant.ahead_segments:
            return
        self._busy[host] = True
        segment = self._todo[host].popleft()
        self.cores[host].ask(segment.raw * self._s_a_byte, lambda: self._encoded(host, segment))

    def _encoded(self, host: int, segment: _Segment) -> None:
        self._busy[host] = False
        self._waiting[host] += 1
        self.most_waiting = max(self.most_waiting, self._waiting[host])
        seconds = segment.size / self._plant.uplink_bytes_s + self._plant.uplink_rtt_s
        self.uplink.ask(seconds, lambda: self._uploaded(host, segment))
        self._encode(host)

    def _uploaded(self, host: int, segment: _Segment) -> None:
        self._waiting[host] -= 1
        self.uploaded_bytes += segment.size
        self._left -= 1
        self._encode(host)
        for cluster in self._clusters:
            cluster.announce(segment)
        if not self._left:
            self._clock.after(self._plant.commit_s, self._commit)

    def _commit(self) -> None:
        self.published_s = self._clock.now_s
        for cluster in self._clusters:
            cluster.commit(self.segments)


class _Cluster:
    """One cluster: a download at a time, then the network inside, then the cores, which decode and hash.

    `_in_hand` segments are in memory; those in `_spooled` wait on disk for the manifest.
    """

    def __init__(self, clock: Clock, egress: SharedLink, plant: Plant, site: ClusterSite, form: Format) -> None:
        self.site = site
        self.cores = Server(clock)
        self.downloaded_bytes = 0.0
        self.serving_s = math.nan
        self.most_waiting = 0
        self._clock, self._egress, self._plant = clock, egress, plant
        self._lan = Server(clock)
        self._there: deque[_Segment] = deque()
        self._spooled: list[_Segment] = []
        self._fetching = False
        self._in_hand = 0
        self._verified = 0
        self._expected: int | None = None
        self._most_in_hand = plant.ahead_segments * site.hosts.hosts
        self._decode_s = 1 / form.decode_bytes_s / site.hosts.workers
        self._hash_s = 1 / plant.hash_bytes_s / site.hosts.workers

    def announce(self, segment: _Segment) -> None:
        self._there.append(segment)
        if self._plant.ahead >= Ahead.FETCH:
            self._fetch()

    def commit(self, segments: int) -> None:
        self._expected = segments
        for segment in self._spooled:
            self._decode(segment, held=False)
        self._spooled.clear()
        self._fetch()
        self._finish()

    def _fetch(self) -> None:
        if self._fetching or not self._there or self._in_hand >= self._most_in_hand:
            return
        self._fetching = True
        self._in_hand += 1
        self.most_waiting = max(self.most_waiting, self._in_hand)
        segment = self._there.popleft()
        self._egress.send(segment.size, cap_bytes_s=self.site.link_bytes_s, then=lambda: self._fetched(segment))

    def _fetched(self, segment: _Segment) -> None:
        self.downloaded_bytes += segment.size
        waits = math.ceil(segment.size / self.site.window_bytes)
        self._clock.after(self.site.rtt_s * max(waits, 1), lambda: self._share(segment, awaited=waits > 0))
        if not waits:
            self._fetch_next()

    def _fetch_next(self) -> None:
        self._fetching = False
        self._fetch()

    def _share(self, segment: _Segment, *, awaited: bool) -> None:
        """`awaited`: nothing else was fetched until the segment was there."""
        if awaited:
            self._fetch_next()
        self._lan.ask(
            segment.size * (self.site.replicas - 1) / self.site.lan_bytes_s,
            lambda: self._shared(segment),
        )

    def _shared(self, segment: _Segment) -> None:
        if self._expected is not None or self._plant.ahead is Ahead.DECODE:
            self._decode(segment, held=True)
            return
        self._spooled.append(segment)
        self._in_hand -= 1
        self._fetch()

    def _decode(self, segment: _Segment, *, held: bool) -> None:
        self.cores.ask(segment.raw * self._decode_s, lambda: self._decoded(segment, held=held))

    def _decoded(self, segment: _Segment, *, held: bool) -> None:
        """`held`: it was in memory, which has room again."""
        self._in_hand -= held
        self.cores.ask(segment.raw * self._hash_s, self._hashed)
        self._fetch()

    def _hashed(self) -> None:
        self._verified += 1
        self._finish()

    def _finish(self) -> None:
        if self._verified == self._expected:
            self.serving_s = self._clock.now_s + self._plant.swap_s


def _cut(raw: float, form: Format) -> list[_Segment]:
    """A shard in segments; all are full but the last."""
    size = raw / form.ratio
    whole, rest = divmod(size, form.segment_bytes)
    sizes = [form.segment_bytes] * int(whole) + ([rest] if rest > 0 else [])
    return [_Segment(size=part, raw=part * form.ratio) for part in sizes]
