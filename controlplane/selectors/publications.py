"""What stands in the store for a version, and what of it a reader is told."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from django.db import connection

from controlplane.models import PolicyVersion, Publication
from controlplane.selectors.weight_paths import edge_of, reach
from controlplane.states import PublicationKind
from rl_core.types import WeightFormat

OFFERED: Final = 64  # a reader reads the manifest of each

_LINE = """
WITH RECURSIVE line AS (
    SELECT id, parent_id, depth, 0 AS hops FROM controlplane_policyversion WHERE id = %s
    UNION ALL
    SELECT parent.id, parent.parent_id, parent.depth, line.hops + 1
    FROM controlplane_policyversion parent JOIN line ON parent.id = line.parent_id
    WHERE parent.depth >= %s
)
SELECT id, depth FROM line ORDER BY hops
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader needs to come to a version's weights in one format. Keys are of manifests; `snapshot` may be "".

    `deltas` are those that it does not find along `manifest` and its bases, or finds a shorter way with.
    """

    root: str
    manifest: str
    snapshot: str
    deltas: tuple[str, ...]


def reading_of(
    version: PolicyVersion, weight_format: WeightFormat = WeightFormat.BF16, *, since: PolicyVersion | None = None
) -> Reading | None:
    """How the version's weights are read from what stands in the store now; None where nothing leads to them.

    `since` is the version that the reader holds, where that is known.
    """
    line = [version_id for version_id, _ in line_of(version)]
    live = Publication.objects.filter(
        version__in=line, format=weight_format, published_at__isnull=False, deleted_at__isnull=True
    )
    rows = {row.pk: row for row in live}
    roots = [row.root for row in rows.values() if row.version_id in _same_weights(version, line)]
    reached = reach(map(edge_of, rows.values()))
    root = next((root for root in roots if root in reached.last), None)
    if root is None:
        return None
    path = [rows[edge.publication].manifest_key for edge in reached.path(root)]
    own = {row.manifest_key for row in rows.values() if row.root == root}
    manifest = version.manifest_key if version.manifest_key in own else path[-1]
    towards = publications_towards(version, weight_format, since=since)
    deltas = dict.fromkeys([*path[1:], *towards])
    return Reading(root, manifest, path[0], tuple(key for key in deltas if key != manifest))


def _same_weights(version: PolicyVersion, line: list[uuid.UUID]) -> set[uuid.UUID]:
    return set(PolicyVersion.objects.filter(pk__in=line, root=version.root).values_list("pk", flat=True))


def line_of(version: PolicyVersion, *, back_to: int = 0) -> list[tuple[uuid.UUID, int]]:
    """`(id, depth)` of the version and its ancestors, nearest first, over lineages, down to depth `back_to`.

    A lineage's first version follows at the depth of the version whose weights it has.
    """
    with connection.cursor() as cursor:
        cursor.execute(_LINE, [version.pk, back_to])
        return [(row[0], row[1]) for row in cursor.fetchall()]


def publications_towards(
    version: PolicyVersion, weight_format: WeightFormat = WeightFormat.BF16, *, since: PolicyVersion | None = None
) -> list[str]:
    """Keys of the skip-deltas that may shorten a reader's way to the version, nearest first.

    The deltas from version to version are not among them: a reader finds these along the manifests. `since` is what
    the reader holds, where that is known: older ones cannot help it.
    """
    line = [version_id for version_id, _ in line_of(version, back_to=since.depth if since else 0)]
    rows = Publication.objects.filter(
        version__in=line,
        format=weight_format,
        kind=PublicationKind.SKIP,
        published_at__isnull=False,
        deleted_at__isnull=True,
    )
    if since is not None:
        rows = rows.filter(base_version__depth__gte=since.depth)
    return list(
        rows.order_by("-version__depth", "base_version__depth").values_list("manifest_key", flat=True)[:OFFERED]
    )
