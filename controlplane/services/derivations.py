"""Publications made from published versions, off the training path: skip-deltas, snapshots, serving formats.

Which are wanted is data, see the settings; each is a planned row and a unit of work of its own, made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.functions import Mod, Now

from controlplane.errors import Conflict
from controlplane.models import PolicyVersion, Publication, Run, WorkUnit
from controlplane.selectors.publications import line_of
from controlplane.services.events import Actor
from controlplane.services.retention import version_hold
from controlplane.services.versions import version_event
from controlplane.services.work import Claim, work_enqueue, work_fenced, work_finish
from controlplane.states import ActorKind, PublicationKind, VersionState, WorkKind, WorkState
from rl_core.types import WeightFormat

DERIVER = Actor(ActorKind.WORKER, "derive")
BATCH: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What a worker published."""

    root: str
    base_root: str
    manifest_key: str
    bytes: int
    full_bytes: int


def derivations_plan() -> int:
    """Plan what the settings want of committed versions and nobody planned yet; how many.

    What died is given up first: nothing waits for it any more, and its versions are not kept for it.
    """
    derivations_bury()
    planned = sum(_plan_skips(interval) for interval in settings.SKIP_DELTAS)
    if settings.SNAPSHOT_EVERY:
        planned += sum(_plan(row, PublicationKind.SNAPSHOT) for row in _without_snapshot(settings.SNAPSHOT_EVERY))
    return planned + sum(_plan_format(WeightFormat(name)) for name in settings.SERVING_FORMATS)


def derivations_bury() -> int:
    """Give up derivations whose unit is dead; how many. A replayed unit takes its derivation up again."""
    dead = WorkUnit.objects.filter(kind=WorkKind.DERIVE, state=WorkState.DEAD)
    planned = Publication.objects.filter(published_at__isnull=True, deleted_at__isnull=True)
    return planned.filter(pk__in=dead.values("ref")).update(deleted_at=Now())


def _plan_skips(interval: int) -> int:
    made = Publication.objects.filter(
        version=OuterRef("pk"),
        kind=PublicationKind.SKIP,
        format=WeightFormat.BF16,
        base_version__depth=OuterRef("depth") - interval,
    )
    return sum(_plan_skip(version, interval) for version in _every(interval).exclude(Exists(made))[:BATCH])


def _plan_skip(version: PolicyVersion, interval: int) -> bool:
    line = line_of(version, back_to=version.depth - interval)
    bases = PolicyVersion.objects.filter(
        pk__in=[version_id for version_id, depth in line if depth == version.depth - interval]
    ).order_by("number")
    base = bases.filter(retired_at__isnull=True).last()
    retired = bases.last()
    if base is None and retired is not None:  # for good: given up at once, so that it is not looked at for ever
        Publication.objects.create(version=version, base_version=retired, kind=PublicationKind.SKIP, deleted_at=Now())
    return base is not None and _plan(version, PublicationKind.SKIP, base=base)


def _without_snapshot(every: int) -> QuerySet[PolicyVersion]:
    made = Publication.objects.filter(version=OuterRef("pk"), kind=PublicationKind.SNAPSHOT, format=WeightFormat.BF16)
    return _every(every).exclude(Exists(made))[:BATCH]


def _plan_format(weight_format: WeightFormat) -> int:
    """Deltas from the parents' weights in the format, once these stand; a snapshot where they never will."""
    made = Publication.objects.filter(version=OuterRef("pk"), format=weight_format)
    # Under whatever version has the parent's weights.
    of_parent = Publication.objects.filter(version__root=OuterRef("parent__root"), format=weight_format)
    live = of_parent.filter(deleted_at__isnull=True)
    given_up = Exists(of_parent.filter(published_at__isnull=True, deleted_at__isnull=False)) & ~Exists(live)
    rows = (
        _committed()
        .exclude(Exists(made))
        .annotate(
            stands=Exists(live.filter(published_at__isnull=False)),
            never=Q(parent__isnull=True) | ~Exists(_committed().filter(root=OuterRef("parent__root"))) | given_up,
        )
    )
    ready = rows.filter(Q(stands=True) | Q(never=True)).select_related("parent").order_by("depth")
    planned = 0
    for version in ready[:BATCH]:
        if version.stands:
            planned += _plan(version, PublicationKind.DELTA, base=version.parent, weight_format=weight_format)
        else:
            planned += _plan(version, PublicationKind.SNAPSHOT, weight_format=weight_format)
    return planned


def _every(interval: int) -> QuerySet[PolicyVersion]:
    at = _committed().annotate(past=Mod(F("depth"), interval)).filter(past=0, depth__gte=interval)
    return at.order_by("depth")


def _committed() -> QuerySet[PolicyVersion]:
    """Versions whose weights are there. A lineage's first version has those of its parent, or of the model."""
    rows = PolicyVersion.objects.filter(state=VersionState.COMMITTED, retired_at__isnull=True)
    return rows.exclude(number=0, parent__isnull=False)


def _plan(
    version: PolicyVersion,
    kind: PublicationKind,
    *,
    base: PolicyVersion | None = None,
    weight_format: WeightFormat = WeightFormat.BF16,
) -> bool:
    """Plan one; False when somebody else just did, or the weights were given up meanwhile."""
    with transaction.atomic():
        try:
            for needed in (version, base):
                if needed is not None:
                    version_hold(needed)
        except Conflict:
            return False
        row, created = Publication.objects.get_or_create(
            version=version, base_version=base, kind=kind, format=weight_format, deleted_at=None
        )
        if created:
            # Not the run's own work: a run that is stopped leaves versions that replicas go on to hold.
            work_enqueue(kind=WorkKind.DERIVE, ref=row.pk, project_id=version.lineage.project_id)
    return created


def derivation_begin(claim: Claim) -> Publication | None:
    """What to derive; None when it stands already, and the unit is finished. One that was given up is planned again."""
    with work_fenced(claim):
        row = Publication.objects.select_related("version__lineage__model", "base_version__lineage__model").get(
            pk=claim.ref
        )
        if row.published_at is not None or not _taken_up(row):
            work_finish(claim)
            return None
    return row


def _taken_up(row: Publication) -> bool:
    """Plan it again if it was given up; whether its versions are still there and nobody planned it anew."""
    if row.deleted_at is None:
        return True
    same = {"version": row.version_id, "base_version": row.base_version_id, "kind": row.kind, "format": row.format}
    if Publication.objects.filter(deleted_at__isnull=True, **same).exists():
        return False
    try:
        for needed in (row.version, row.base_version):
            if needed is not None:
                version_hold(needed)
    except Conflict:
        return False
    Publication.objects.filter(pk=row.pk).update(deleted_at=None)
    row.deleted_at = None
    return True


def derivation_done(claim: Claim, *, publication: Publication, derived: Derived) -> None:
    """It stands in the store: readers are told of it from here on. Raises: StaleFence; Conflict for a wrong root."""
    version = publication.version
    if publication.format == WeightFormat.BF16 and derived.root != version.root:
        raise Conflict(f"{version.ref} was derived with root {derived.root[:16]}…, not {version.root[:16]}…")
    with work_fenced(claim):
        Publication.objects.filter(pk=publication.pk, published_at__isnull=True).update(
            root=derived.root,
            base_root=derived.base_root,
            manifest_key=derived.manifest_key,
            bytes=derived.bytes,
            full_bytes=derived.full_bytes,
            published_at=Now(),
        )
        work_finish(claim)
        run = Run.objects.filter(lineage=version.lineage_id).first()
        version_event(version, run=run, actor=DERIVER, reason=f"{publication.kind} in {publication.format} published")


def derivation_prefix(publication: Publication, *, fence: int) -> str:
    """Where an attempt publishes it: the row's id and the fence make the place its own."""
    return f"{_home(publication.version)}/derived-{publication.pk}/{fence}"


def _home(version: PolicyVersion) -> str:
    return f"lineages/{version.lineage_id}/{version.epoch}-{version.number}"
