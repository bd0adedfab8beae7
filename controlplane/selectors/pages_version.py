"""Reads for the pages: one version, who holds it, why its weights stay, what of it is in the store."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from controlplane.models import Export, PolicyVersion, Publication, ReplicaSlot, ServedVersion, Step
from controlplane.selectors.exports import exports_of
from controlplane.selectors.versions_needed import versions_needed

MOST_SERVED = 20


@dataclass(frozen=True, slots=True)
class VersionView:
    """One version with everything its page shows, exports apart."""

    version: PolicyVersion
    step: Step | None
    slots: list[ReplicaSlot]  # that hold it, or should
    needed_by: list[str]
    publications: list[Publication]
    served: list[ServedVersion]


def version_of_page(version_id: UUID) -> PolicyVersion | None:
    """The version with its lineage; None where there is none."""
    rows = PolicyVersion.objects.select_related("lineage__project", "lineage__model", "lineage__run", "parent")
    return rows.filter(pk=version_id).first()


def version_view(version: PolicyVersion) -> VersionView:
    """What is known of a version; some twenty small queries, most of them to say why it stays."""
    slots = ReplicaSlot.objects.select_related("replica__cluster", "current_version", "desired_version")
    held = slots.filter(current_version=version) | slots.filter(desired_version=version)
    published = Publication.objects.filter(version=version, published_at__isnull=False, deleted_at__isnull=True)
    served = ServedVersion.objects.filter(version=version).select_related("lane").order_by("-created_at")
    return VersionView(
        version=version,
        step=Step.objects.filter(version=version).select_related("run").first(),
        slots=list(held.order_by("replica__cluster__slug", "replica__name", "-slot")),
        needed_by=versions_needed([version.pk]).get(version.pk, []),
        publications=list(published.select_related("base_version").order_by("format", "kind", "bytes")),
        served=list(served[:MOST_SERVED]),
    )


def exports_view(version: PolicyVersion) -> list[Export]:
    """The version's exports, newest first."""
    return list(exports_of(version.lineage.project, version=version).order_by("-pk"))
