"""Groups, rollouts, trajectories."""

from __future__ import annotations

from typing import Any

import msgspec
from django.db.models import QuerySet

from controlplane.api.base import DetailView, ListView, one
from controlplane.api.filters import GroupFilter, RolloutFilter
from controlplane.api.serializers.rollouts import GroupSerializer, RolloutSerializer, TrajectorySerializer
from controlplane.models import Rollout, RolloutGroup
from controlplane.selectors import api_runs as select
from rl_core.types import Routes


class GroupList(ListView):
    """Rollout groups."""

    serializer_class = GroupSerializer
    filterset_class = GroupFilter

    def rows(self) -> QuerySet[RolloutGroup]:
        """Groups."""
        return select.groups_of(self.project)


class GroupDetail(DetailView):
    """One rollout group."""

    serializer_class = GroupSerializer

    def row(self) -> RolloutGroup:
        """The group of the path."""
        group: RolloutGroup = one(select.groups_of(self.project), "group", pk=self.kwargs["id"])
        return group


class RolloutList(ListView):
    """Rollouts with their scores."""

    serializer_class = RolloutSerializer
    filterset_class = RolloutFilter

    def rows(self) -> QuerySet[Rollout]:
        """Rollouts."""
        return select.rollouts_of(self.project)


class RolloutDetail(DetailView):
    """One rollout."""

    serializer_class = RolloutSerializer

    def row(self) -> Rollout:
        """The rollout of the path."""
        rollout: Rollout = one(select.rollouts_of(self.project), "rollout", pk=self.kwargs["id"])
        return rollout


class TrajectoryDetail(DetailView):
    """What a rollout said and sampled, token by token."""

    serializer_class = TrajectorySerializer

    def row(self) -> dict[str, Any]:
        """The trajectory, decoded from the store."""
        rollout = one(select.rollouts_of(self.project), "rollout", pk=self.kwargs["id"])
        trajectory = select.trajectory_of(rollout)
        shapes = [_shape(segment.routes) for segment in trajectory.segments]
        for segment in trajectory.segments:
            segment.routes = None  # megabytes of expert ids, which no JSON reader wants
        data: dict[str, Any] = msgspec.to_builtins(trajectory)
        for segment_data, shape in zip(data["segments"], shapes, strict=True):
            segment_data["routes"] = shape
        return {"rollout": rollout.pk, **data}


def _shape(routes: Routes | None) -> dict[str, Any] | None:
    if routes is None:
        return None
    return {"tokens": routes.tokens, "layers": routes.layers, "top_k": routes.top_k, "dtype": routes.dtype}
