"""Policy versions: begun with a fence, committed by compare-and-set of the lineage's head.

No version ever names two weights: a number is begun once in its epoch, and only the newest fence commits it.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from controlplane.errors import Conflict, StaleFence
from controlplane.models import Lineage, ModelCard, PolicyVersion, Project, Publication, Run
from controlplane.services.events import Actor, conductor_nudge, event_append, project_topic, run_topic
from controlplane.services.retention import version_hold
from controlplane.services.transitions import transition
from controlplane.states import EventType, PublicationKind, VersionState
from rl_core.links import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """What stands in the store for a version: its root, where, and how large.

    `base` is the version that the delta is made from; the version's parent unless it is named. `choice` is what it was
    encoded in and why, `encode_s` and `upload_s` how long that and sending it took; None where that is not known.
    """

    root: str
    manifest_key: str
    delta_bytes: int
    full_bytes: int
    changed_elements: int
    elements: int
    snapshot_key: str = ""
    base: PolicyVersion | None = None
    choice: Choice | None = None
    encode_s: float | None = None
    upload_s: float | None = None


def lineage_create(*, project: Project, model: ModelCard, parent: PolicyVersion | None) -> Lineage:
    """A new chain whose version 0 is committed at once: the model's weights, or those of `parent` for a fork.

    Its bytes and their manifest stand in the store already, under the model's or the parent's name.
    Raises: Conflict when the parent's weights were given up.
    """
    with transaction.atomic():
        if parent is not None:
            version_hold(parent)
        lineage = Lineage.objects.create(project=project, model=model, parent=parent)
        first = PolicyVersion.objects.create(
            lineage=lineage,
            epoch=0,
            number=0,
            state=VersionState.COMMITTED,
            parent=parent,
            root=parent.root if parent else model.root,
            manifest_key=parent.manifest_key if parent else model.manifest_key,
            snapshot_key=parent.snapshot_key if parent else model.manifest_key,
            full_bytes=(parent.full_bytes if parent else None) or model.full_bytes,
            elements=parent.elements if parent else None,
            depth=parent.depth if parent else 0,
            committed_at=Now(),
        )
        if parent is None:
            _published(first, kind=PublicationKind.SNAPSHOT, size=None)
        Lineage.objects.filter(pk=lineage.pk).update(head=first)
        lineage.head = first
    return lineage


def version_begin(*, lineage: Lineage, epoch: int, number: int, parent: PolicyVersion, fence: int) -> PolicyVersion:
    """Reserve a version for the attempt with this fence; a newer fence takes over what an older one left unfinished.

    A version that is already committed is returned as it is, for the caller to adopt or to refuse.
    Raises: StaleFence when a newer attempt has begun it.
    """
    with transaction.atomic():
        version, created = PolicyVersion.objects.get_or_create(
            lineage=lineage,
            epoch=epoch,
            number=number,
            defaults={"parent": parent, "fence": fence, "depth": parent.depth + 1},
        )
        if created or version.state != VersionState.PUBLISHING:
            return version
        taken = PolicyVersion.objects.filter(pk=version.pk, state=VersionState.PUBLISHING, fence__lte=fence)
        if not taken.update(fence=fence, parent=parent, depth=parent.depth + 1):
            raise StaleFence(f"version {version.ref} is published by a newer attempt than {fence}")
        version.fence, version.parent = fence, parent
    return version


def version_commit(
    *, version: PolicyVersion, fence: int, weights: PublishedWeights, run: Run | None, actor: Actor
) -> PolicyVersion:
    """Commit the version and move its lineage's head from its parent to it, both or neither.

    Raises: StaleFence when a newer attempt has the version; Conflict when the head is no longer the parent.
    """
    with transaction.atomic():
        if not PolicyVersion.objects.select_for_update().filter(pk=version.pk, fence=fence).exists():
            raise StaleFence(f"version {version.ref} is published by a newer attempt than {fence}")
        transition(
            version,
            to=VersionState.COMMITTED,
            root=weights.root,
            manifest_key=weights.manifest_key,
            snapshot_key=weights.snapshot_key or _inherited_snapshot(version),
            delta_bytes=weights.delta_bytes,
            full_bytes=weights.full_bytes,
            changed_elements=weights.changed_elements,
            elements=weights.elements,
            committed_at=Now(),
        )
        delta = _published(
            version, kind=PublicationKind.DELTA, size=weights.delta_bytes, base=weights.base or version.parent
        )
        if weights.choice is not None:
            Publication.objects.filter(pk=delta.pk).update(
                profile=weights.choice.profile.value,
                profile_reason=weights.choice.reason,
                encode_s=weights.encode_s,
                upload_s=weights.upload_s,
            )
        moved = Lineage.objects.filter(pk=version.lineage_id, head_id=version.parent_id).update(head=version)
        if not moved:
            raise Conflict(f"the head of lineage {version.lineage_id} is not the parent of {version.ref}")
        version_event(version, run=run, actor=actor)
        conductor_nudge()
    version.refresh_from_db()
    return version


def version_abandon(*, version: PolicyVersion, run: Run | None, actor: Actor, reason: str) -> PolicyVersion:
    """Give up a version that was never committed; what it left in the store is garbage."""
    with transaction.atomic():
        transition(version, to=VersionState.ABANDONED)
        version_event(version, run=run, actor=actor, reason=reason)
    return version


def epoch_open(*, run: Run, lineage: Lineage, actor: Actor, reason: str) -> int:
    """Open the lineage's next epoch: weights derived again differ from those published. Returns its number.

    What older epochs were still publishing is abandoned.
    """
    with transaction.atomic():
        Lineage.objects.filter(pk=lineage.pk).update(epoch=F("epoch") + 1)
        lineage.refresh_from_db()
        unfinished = lineage.versions.filter(state=VersionState.PUBLISHING, epoch__lt=lineage.epoch)
        unfinished.update(state=VersionState.ABANDONED)
        event_append(
            project_id=run.project_id,
            topic=run_topic(run.pk),
            event_type=EventType.EPOCH_OPENED,
            actor=actor,
            reason=reason,
            data={"lineage": str(lineage.pk), "epoch": lineage.epoch},
        )
    return lineage.epoch


def _published(
    version: PolicyVersion, *, kind: PublicationKind, size: int | None, base: PolicyVersion | None = None
) -> Publication:
    """Record what stands in the store under the version's own manifest."""
    return Publication.objects.create(
        version=version,
        base_version=base,
        kind=kind,
        root=version.root,
        base_root=base.root if base else "",
        manifest_key=version.manifest_key,
        bytes=size,
        full_bytes=version.full_bytes,
        published_at=Now(),
    )


def _inherited_snapshot(version: PolicyVersion) -> str:
    """The nearest ancestor's snapshot: from it and the deltas since, a replica can reach the version from nothing."""
    return version.parent.snapshot_key if version.parent else ""


def version_event(version: PolicyVersion, *, run: Run | None, actor: Actor, reason: str = "") -> None:
    """Append the version's present state to its run's log, or to its project's, in the caller's transaction."""
    project_id = run.project_id if run else version.lineage.project_id
    event_append(
        project_id=project_id,
        topic=run_topic(run.pk) if run else project_topic(project_id),
        event_type=EventType.VERSION_CHANGED,
        actor=actor,
        reason=reason,
        data={
            "version": str(version.pk),
            "ref": str(version.ref),
            "epoch": version.epoch,
            "number": version.number,
            "state": version.state,
            "root": version.root,
            "delta_bytes": version.delta_bytes,
            "full_bytes": version.full_bytes,
        },
    )
