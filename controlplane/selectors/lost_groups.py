"""Reads for the pages: groups of a run that environment or infrastructure failed, and what becomes of their tasks."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Count

from controlplane.models import RolloutGroup, Run
from controlplane.services.groups import LOST, TRIES_OF_A_DRAW
from controlplane.states import GroupState

SHOWN = 10


@dataclass(frozen=True, slots=True)
class LostGroup:
    """A group that was voided. `tries` counts the groups that its draw has lost so far."""

    group: RolloutGroup
    tries: int
    admitted_again: bool

    @property
    def fate(self) -> str:
        """What becomes of its task."""
        if self.admitted_again:
            return "admitted again"
        return f"let go after {self.tries} groups" if self.tries >= TRIES_OF_A_DRAW else "comes back"


def lost_groups(run: Run) -> list[LostGroup]:
    """The newest voided groups of a run."""
    rows = run.groups.filter(state=GroupState.VOIDED, stage__isnull=False).select_related("task")
    groups = list(rows.defer("task__input", "task__reference").order_by("-finished_at")[:SHOWN])
    siblings = run.groups.filter(
        stage__in={group.stage_id for group in groups}, draw__in={group.draw for group in groups}
    ).values_list("stage", "draw")
    lost = siblings.filter(state__in=LOST).annotate(n=Count("pk"))
    tries = {(stage, draw): n for stage, draw, n in lost}
    again = set(siblings.exclude(state__in=LOST))
    places = [(group, (group.stage_id, group.draw)) for group in groups]
    return [LostGroup(group, tries.get(place, 1), place in again) for group, place in places]
