"""Runs, their control, and what they are made of."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import EvaluationFilter, RunFilter, StepFilter
from controlplane.api.pagination import Keyset, page_size
from controlplane.api.serializers.capacity import RunCapacitySerializer
from controlplane.api.serializers.runs import (
    EvaluationSerializer,
    ForkInput,
    MetricsSerializer,
    RunActionInput,
    RunInput,
    RunSerializer,
    SpecSchemaSerializer,
    StageSerializer,
    StepSerializer,
)
from controlplane.errors import Invalid
from controlplane.models import Evaluation, Run, Stage, Step
from controlplane.permissions import Action
from controlplane.selectors import api_runs as select
from controlplane.selectors.capacity import RunCapacity, capacity_of
from controlplane.services import runs
from rl_core.specs import run_spec_schema

MAX_POINTS = 2000
MAX_NAMES = 50


class RunList(Post, ListView):
    """Runs. POST creates one; the conductor starts it."""

    actions = {"GET": Action.READ, "POST": Action.RUNS_CONTROL}
    serializer_class = RunSerializer
    input_serializer = RunInput
    filterset_class = RunFilter

    def rows(self) -> QuerySet[Run]:
        """Runs."""
        return select.runs_of(self.project)

    def perform(self, data: dict[str, Any]) -> Run:
        """Create it from its spec."""
        run = runs.run_create(
            project=self.project, name=data["name"], spec=data["spec"], actor=self.actor, user=self.principal.user
        )
        return select.runs_of(self.project).get(pk=run.pk)


class SpecSchema(DetailView):
    """The JSON Schema of run specs."""

    serializer_class = SpecSchemaSerializer

    def get(self, request: Request, **kwargs: Any) -> Response:
        """The document."""
        return Response(run_spec_schema())


class _OfRun:
    """Finds the run of the path."""

    project: Any
    kwargs: Any

    def run(self) -> Run:
        """Raises: NotFound."""
        run: Run = one(select.runs_of(self.project), "run", pk=self.kwargs["id"])
        return run


class RunDetail(_OfRun, DetailView):
    """One run."""

    serializer_class = RunSerializer

    def row(self) -> Run:
        """The run of the path."""
        return self.run()


class RunCapacityDetail(_OfRun, DetailView):
    """What keeps the run's trainer busy, what is idle, what a replica more would buy, and what a task costs."""

    serializer_class = RunCapacitySerializer

    def row(self) -> RunCapacity:
        """Measured over the run's last steps."""
        return capacity_of(self.run())


class _RunAction(_OfRun, ActionView):
    """A change of a run's state; 409 where the state does not allow it."""

    actions = {"POST": Action.RUNS_CONTROL}
    serializer_class = RunSerializer
    input_serializer = RunActionInput
    service: ClassVar[Any]

    def perform(self, data: dict[str, Any]) -> Run:
        """Call the service."""
        run = type(self).service(run=self.run(), actor=self.actor, reason=data["reason"])
        return select.runs_of(self.project).get(pk=run.pk)


class RunPause(_RunAction):
    """Start nothing new; what is under way goes on to its end."""

    service = staticmethod(runs.run_pause)


class RunResume(_RunAction):
    """Go on with a paused or failed run."""

    service = staticmethod(runs.run_resume)


class RunStop(_RunAction):
    """End the run for good."""

    service = staticmethod(runs.run_stop)


class RunFork(_OfRun, ActionView):
    """A new run from the weights after one of this run's steps."""

    actions = {"POST": Action.RUNS_CONTROL}
    serializer_class = RunSerializer
    input_serializer = ForkInput
    success_status = 201

    def perform(self, data: dict[str, Any]) -> Run:
        """Fork it."""
        fork = runs.run_fork(
            run=self.run(),
            step_number=data["step_number"],
            name=data["name"],
            overrides=data["overrides"],
            actor=self.actor,
            user=self.principal.user,
        )
        return select.runs_of(self.project).get(pk=fork.pk)


class StageList(_OfRun, ListView):
    """Stages of a run, in order."""

    serializer_class = StageSerializer
    keyset = Keyset("position", int, descending=False)

    def rows(self) -> QuerySet[Stage]:
        """Stages."""
        return select.stages_of(self.run())


class StepList(_OfRun, ListView):
    """Steps of a run, from the first."""

    serializer_class = StepSerializer
    filterset_class = StepFilter
    keyset = Keyset("number", int, descending=False)

    def rows(self) -> QuerySet[Step]:
        """Steps."""
        return select.steps_of(self.run())


class StepDetail(_OfRun, DetailView):
    """One step by its number."""

    serializer_class = StepSerializer

    def row(self) -> Step:
        """The step of the path."""
        step: Step = one(select.steps_of(self.run()), "step", number=self.kwargs["number"])
        return step


class Metrics(_OfRun, DetailView):
    """Series of a run, thinned on the server to at most `points` values each."""

    serializer_class = MetricsSerializer
    query = frozenset({"name", "points"})
    documented = (
        OpenApiParameter("name", str, many=True, description=f"at most {MAX_NAMES} series; none: all of the run's"),
        OpenApiParameter("points", {"type": "integer", "minimum": 3, "maximum": MAX_POINTS, "default": MAX_POINTS}),
    )

    def row(self) -> dict[str, Any]:
        """The series."""
        run = self.run()
        names = self.request.query_params.getlist("name")
        if len(names) > MAX_NAMES or any(not name or len(name) > 80 or "\x00" in name for name in names):
            raise Invalid(f"name: at most {MAX_NAMES} names of 1 to 80 characters", "name")
        points = page_size(self.request, name="points", default=MAX_POINTS, most=MAX_POINTS)
        if points < 3:
            raise Invalid("points must be at least 3", "points")
        return {"run": run.pk, "series": select.metric_series(run_id=run.pk, names=names, points=points)}


class EvaluationList(ListView):
    """Evaluations of versions on held-out tasks."""

    serializer_class = EvaluationSerializer
    filterset_class = EvaluationFilter

    def rows(self) -> QuerySet[Evaluation]:
        """Evaluations."""
        return select.evaluations_of(self.project)


class EvaluationDetail(DetailView):
    """One evaluation."""

    serializer_class = EvaluationSerializer

    def row(self) -> Evaluation:
        """The evaluation of the path."""
        evaluation: Evaluation = one(select.evaluations_of(self.project), "evaluation", pk=self.kwargs["id"])
        return evaluation
