"""Reads for the pages: weights on their way, and those that arrived or did not."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import QuerySet

from controlplane.models import Project, Replica, Transfer
from controlplane.states import UNDER_WAY

MOST_UNDER_WAY = 200


@dataclass(frozen=True, slots=True)
class Moving:
    """A transfer that is not over. `share` of its bytes is there; None while it is not known what there is to fetch."""

    transfer: Transfer
    share: float | None


@dataclass(frozen=True, slots=True)
class TransfersView:
    """Those under way, oldest first, and those that are over, newest first."""

    moving: list[Moving]
    over: list[Transfer]


def transfers_view(project: Project, size: int = 40, *, replica: Replica | None = None) -> TransfersView:
    """A project's transfers, or those of one replica; the newest `size` of those that are over."""
    rows = _rows(project) if replica is None else _rows(project).filter(replica=replica)
    moving = rows.filter(state__in=UNDER_WAY).order_by("pk")[:MOST_UNDER_WAY]
    over = rows.exclude(state__in=UNDER_WAY).order_by("-pk")[:size]
    return TransfersView([Moving(transfer, _share(transfer)) for transfer in moving], list(over))


def _rows(project: Project) -> QuerySet[Transfer]:
    rows = Transfer.objects.filter(replica__cluster__project=project)
    return rows.select_related("replica__cluster", "version", "from_version")


def _share(transfer: Transfer) -> float | None:
    if transfer.done_bytes is None or not transfer.total_bytes:
        return None
    return min(1.0, transfer.done_bytes / transfer.total_bytes)
