"""Routes of `/api/v1`. Everything of a project lies below `/projects/{project}`."""

from __future__ import annotations

from django.urls import URLPattern, path, re_path, register_converter
from django.views.decorators.csrf import csrf_exempt
from drf_spectacular.views import SpectacularAPIView

from controlplane.api.fallbacks import not_found
from controlplane.api.schema import DOCUMENT_SETTINGS
from controlplane.api.views import (
    alerts,
    cadence,
    catalog,
    exports,
    feedback,
    fleet,
    intake,
    lanes,
    lending,
    recording,
    releases,
    replica_acts,
    rollouts,
    runs,
    signals,
    tasks,
    tenancy,
    work,
)


class NumberConverter:
    """A number that a 32-bit column can hold; anything longer is a path that does not exist."""

    regex = "[0-9]{1,9}"

    def to_python(self, value: str) -> int:
        """The number."""
        return int(value)

    def to_url(self, value: int) -> str:
        """Its digits."""
        return str(value)


register_converter(NumberConverter, "number")


def _of_project(route: str, view: type) -> URLPattern:
    return path(f"projects/<slug:project>/{route}", view.as_view())  # type: ignore[attr-defined]


urlpatterns = [
    path("me", tenancy.Me.as_view()),
    path("events", work.EventsAfter.as_view()),
    path("feedback", intake.FeedbackReceive.as_view()),
    path("feedback/batch", intake.FeedbackBatch.as_view()),
    path("product-events", intake.ProductEvents.as_view()),
    path("projects", tenancy.ProjectList.as_view()),
    path("projects/<slug:project>", tenancy.ProjectDetail.as_view()),
    _of_project("users", tenancy.UserList),
    _of_project("memberships", tenancy.MembershipList),
    _of_project("memberships/<uuid:id>", tenancy.MembershipDetail),
    _of_project("keys", tenancy.KeyList),
    _of_project("keys/<uuid:id>", tenancy.KeyDetail),
    _of_project("keys/<uuid:id>/revoke", tenancy.KeyRevoke),
    _of_project("models", catalog.ModelList),
    _of_project("models/<slug:slug>", catalog.ModelDetail),
    _of_project("environments", catalog.EnvironmentList),
    _of_project("environments/<slug:slug>", catalog.EnvironmentDetail),
    _of_project("environments/<slug:slug>/watch", tasks.EnvironmentWatch),
    _of_project("task-sets", catalog.TaskSetList),
    _of_project("task-sets/file", catalog.TaskSetFile),
    _of_project("task-sets/<uuid:id>", catalog.TaskSetDetail),
    _of_project("task-sets/<uuid:id>/tasks", catalog.TaskList),
    _of_project("task-sets/<uuid:id>/report", tasks.TaskSetReport),
    _of_project("tasks/<uuid:id>", catalog.TaskDetail),
    _of_project("tasks/<uuid:id>/history", tasks.TaskHistory),
    _of_project("rubrics", catalog.RubricList),
    _of_project("rubrics/<slug:slug>", catalog.RubricDetail),
    _of_project("rubrics/<slug:slug>/versions", catalog.RubricVersionList),
    _of_project("rubrics/<slug:slug>/versions/<number:number>", catalog.RubricVersionDetail),
    _of_project("clusters", fleet.ClusterList),
    _of_project("clusters/<slug:slug>", fleet.ClusterDetail),
    _of_project("clusters/<slug:slug>/configure", fleet.ClusterConfigure),
    _of_project("clusters/<slug:slug>/lending", lending.ClusterLending),
    _of_project("clusters/<slug:slug>/replicas", replica_acts.ReplicaEnrol),
    _of_project("lending", lending.LendingAllowed),
    _of_project("lending-schema", lending.LendingSchema),
    _of_project("loans", lending.LoanList),
    _of_project("loans/<uuid:id>", lending.LoanDetail),
    _of_project("replicas", fleet.ReplicaList),
    _of_project("replicas/<uuid:id>", fleet.ReplicaDetail),
    _of_project("replicas/<uuid:id>/pin", replica_acts.ReplicaPin),
    _of_project("replicas/<uuid:id>/unpin", replica_acts.ReplicaUnpin),
    _of_project("replicas/<uuid:id>/drain", replica_acts.ReplicaDrain),
    _of_project("replicas/<uuid:id>/undrain", replica_acts.ReplicaUndrain),
    _of_project("replicas/<uuid:id>/repair", replica_acts.ReplicaRepair),
    _of_project("replicas/<uuid:id>/lend", replica_acts.ReplicaLend),
    _of_project("replicas/<uuid:id>/return", replica_acts.ReplicaReturn),
    _of_project("replicas/<uuid:id>/forget", replica_acts.ReplicaForget),
    _of_project("replicas/<uuid:id>/lease", replica_acts.ReplicaLease),
    _of_project("versions", fleet.VersionList),
    _of_project("versions/<uuid:id>", fleet.VersionDetail),
    _of_project("exports", exports.ExportList),
    _of_project("exports/<uuid:id>", exports.ExportDetail),
    _of_project("exports/<uuid:id>/delete", exports.ExportDelete),
    _of_project("exports/<uuid:id>/files/<str:name>", exports.ExportFileDownload),
    _of_project("transfers", fleet.TransferList),
    _of_project("transfers/<uuid:id>", fleet.TransferDetail),
    _of_project("runs", runs.RunList),
    _of_project("runs/spec-schema", runs.SpecSchema),
    _of_project("runs/<uuid:id>", runs.RunDetail),
    _of_project("runs/<uuid:id>/capacity", runs.RunCapacityDetail),
    _of_project("runs/<uuid:id>/pause", runs.RunPause),
    _of_project("runs/<uuid:id>/resume", runs.RunResume),
    _of_project("runs/<uuid:id>/stop", runs.RunStop),
    _of_project("runs/<uuid:id>/fork", runs.RunFork),
    _of_project("runs/<uuid:id>/stages", runs.StageList),
    _of_project("runs/<uuid:id>/steps", runs.StepList),
    _of_project("runs/<uuid:id>/steps/<number:number>", runs.StepDetail),
    _of_project("runs/<uuid:id>/metrics", runs.Metrics),
    _of_project("evaluations", runs.EvaluationList),
    _of_project("evaluations/<uuid:id>", runs.EvaluationDetail),
    _of_project("groups", rollouts.GroupList),
    _of_project("groups/<uuid:id>", rollouts.GroupDetail),
    _of_project("rollouts", rollouts.RolloutList),
    _of_project("rollouts/<uuid:id>", rollouts.RolloutDetail),
    _of_project("rollouts/<uuid:id>/trajectory", rollouts.TrajectoryDetail),
    _of_project("events", work.EventList),
    _of_project("work", work.WorkList),
    _of_project("work/<uuid:id>", work.WorkDetail),
    _of_project("work/<uuid:id>/replay", work.WorkReplay),
    _of_project("work/<uuid:id>/attempts", work.AttemptList),
    _of_project("attempts", work.AttemptList),
    _of_project("attempts/<uuid:id>", work.AttemptDetail),
    _of_project("dead-letters", work.DeadLetterList),
    _of_project("lanes", lanes.LaneList),
    _of_project("lanes/<slug:slug>", lanes.LaneDetail),
    _of_project("lanes/<slug:slug>/served", lanes.LaneServed),
    _of_project("lanes/<slug:slug>/served-at", lanes.LaneServedAt),
    _of_project("lanes/<slug:slug>/cadence", cadence.LaneCadence),
    _of_project("lanes/<slug:slug>/slots", cadence.SlotList),
    _of_project("lanes/<slug:slug>/pause", cadence.LanePause),
    _of_project("lanes/<slug:slug>/resume", cadence.LaneResume),
    _of_project("lanes/<slug:slug>/run-now", cadence.LaneRunNow),
    _of_project("lanes/<slug:slug>/skip", cadence.LaneSkip),
    _of_project("lanes/<slug:slug>/rollback", cadence.LaneRollback),
    _of_project("lanes/<slug:slug>/train", lanes.LaneTrain),
    _of_project("lanes/<slug:slug>/recording", recording.LaneRecording),
    _of_project("lanes/<slug:slug>/erase", lanes.LaneErase),
    _of_project("lanes/<slug:slug>/withdraw-consent", lanes.LaneWithdrawConsent),
    _of_project("generations", lanes.GenerationList),
    _of_project("cadence-schema", cadence.CadenceSchema),
    _of_project("releases", releases.ReleaseList),
    _of_project("releases/<uuid:id>", releases.ReleaseDetail),
    _of_project("releases/<uuid:id>/steps", releases.ReleaseSteps),
    _of_project("releases/<uuid:id>/approve", releases.ReleaseApprove),
    _of_project("releases/<uuid:id>/advance", releases.ReleaseAdvance),
    _of_project("releases/<uuid:id>/pause", releases.ReleasePause),
    _of_project("releases/<uuid:id>/resume", releases.ReleaseResume),
    _of_project("releases/<uuid:id>/promote", releases.ReleasePromote),
    _of_project("releases/<uuid:id>/abort", releases.ReleaseAbort),
    _of_project("releases/<uuid:id>/rollback", releases.ReleaseRollback),
    _of_project("alerts", alerts.AlertList),
    _of_project("alerts/<uuid:id>", alerts.AlertDetail),
    _of_project("alerts/<uuid:id>/resolve", alerts.AlertResolve),
    _of_project("alerts/<uuid:id>/deliveries", alerts.AlertDeliveryList),
    _of_project("alert-hooks", alerts.HookList),
    _of_project("alert-hooks/<uuid:id>/disable", alerts.HookDisable),
    _of_project("feedback", feedback.FeedbackList),
    _of_project("feedback/health", feedback.FeedbackHealth),
    _of_project("feedback/<uuid:id>/retract", feedback.FeedbackRetract),
    _of_project("rejected-payloads", feedback.RejectedList),
    _of_project("rejected-payloads/<uuid:id>/replay", feedback.RejectedReplay),
    _of_project("signals", signals.SignalList),
    _of_project("signals/detected", signals.DetectedSignals),
    _of_project("signal-maps", signals.SignalMapList),
    _of_project("sources", signals.SourceList),
    _of_project("sources/<slug:slug>/rotate", signals.SourceRotate),
    _of_project("sources/<slug:slug>/configure", signals.SourceConfigure),
    _of_project("sources/<slug:slug>/keys", signals.SourceKeys),
    path("schema", SpectacularAPIView.as_view(custom_settings=DOCUMENT_SETTINGS)),
    # Last: an unknown path is a problem+json too. It changes nothing, so it asks for no CSRF token either.
    re_path(r"^.*$", csrf_exempt(not_found)),
]
