"""Reads for the pages: the chains of versions, what stands in the store for each, and who holds which."""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass, field

from django.db.models import Q

from controlplane.models import Lineage, PolicyVersion, Project, Publication, ReplicaSlot
from controlplane.states import PublicationKind, RunState, VersionState

MOST_LINEAGES = 4
MOST_VERSIONS = 24


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot, delta or skip-delta of a version. `base` is its base's column; None: it lies before the first."""

    publication: Publication
    base: int | None


@dataclass(slots=True)
class Column:
    """One version of the chain, in the order of training."""

    version: PolicyVersion
    published: list[Published] = field(default_factory=list)

    @property
    def snapshot(self) -> Published | None:
        """The whole weights, where they stand in the store."""
        return next((one for one in self.published if one.publication.kind == PublicationKind.SNAPSHOT), None)

    @property
    def deltas(self) -> list[Published]:
        """Deltas and skip-deltas that lead to it, the shortest step first."""
        return [one for one in self.published if one.publication.kind != PublicationKind.SNAPSHOT]


@dataclass(frozen=True, slots=True)
class Holders:
    """A cluster's replicas on the chain: by column, the names of those that hold it and of those that should."""

    cluster: str
    hold: dict[int, list[str]]
    want: dict[int, list[str]]


@dataclass(frozen=True, slots=True)
class Chain:
    """The newest versions of a lineage, oldest first; `older` more lie before them."""

    lineage: Lineage
    columns: list[Column]
    holders: list[Holders]
    older: int

    @property
    def publications(self) -> list[tuple[Column, Published]]:
        """Everything that stands in the store for them, newest version first."""
        return [(column, one) for column in reversed(self.columns) for one in column.published]


def chains_view(project: Project, size: int = MOST_VERSIONS) -> list[Chain]:
    """The chains that replicas are on or running runs train, newest lineage first; four queries for each."""
    slots = list(
        ReplicaSlot.objects.filter(replica__cluster__project=project)
        .select_related("replica__cluster", "current_version", "desired_version")
        .order_by("replica__cluster__slug", "replica__name", "slot")
    )
    held = {version.lineage_id for slot in slots for version in _versions(slot)}
    wanted = Lineage.objects.filter(project=project).filter(Q(pk__in=held) | Q(run__state=RunState.RUNNING))
    lineages = wanted.select_related("run", "model").order_by("-pk")[:MOST_LINEAGES]
    return [_chain(lineage, slots, size) for lineage in lineages]


def _versions(slot: ReplicaSlot) -> list[PolicyVersion]:
    return [version for version in (slot.current_version, slot.desired_version) if version is not None]


def _chain(lineage: Lineage, slots: list[ReplicaSlot], size: int) -> Chain:
    rows = PolicyVersion.objects.filter(lineage=lineage, state=VersionState.COMMITTED).order_by("-epoch", "-number")
    columns = [Column(version) for version in reversed(rows[:size])]
    place = {column.version.pk: number for number, column in enumerate(columns)}
    published = Publication.objects.filter(
        version__in=place, published_at__isnull=False, deleted_at__isnull=True
    ).select_related("version", "base_version")
    for one in published.order_by("version__epoch", "version__number", "-base_version__depth", "format"):
        base = place.get(one.base_version_id) if one.base_version_id else None
        columns[place[one.version_id]].published.append(Published(one, base))
    return Chain(lineage, columns, _holders(slots, place), max(0, rows.count() - len(columns)))


def _holders(slots: list[ReplicaSlot], place: dict[uuid.UUID, int]) -> list[Holders]:
    hold: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    want: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for slot in slots:
        cluster, name = slot.replica.cluster.slug, slot.replica.name
        now = place.get(slot.current_version_id) if slot.current_version_id else None
        wish = place.get(slot.desired_version_id) if slot.desired_version_id else None
        if now is not None and name not in hold[cluster][now]:
            hold[cluster][now].append(name)
        if wish is not None and wish != now:
            want[cluster][wish].append(name)
    return [Holders(cluster, dict(hold[cluster]), dict(want[cluster])) for cluster in sorted({*hold, *want})]
