"""Routes of the pages."""

from __future__ import annotations

from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path

from frontend.views import (
    assets,
    catalog,
    control,
    events,
    feedback,
    fleet,
    home,
    lanes,
    new_run,
    people,
    rollouts,
    rubrics,
    runs,
    work,
)

urlpatterns = [
    path(
        "login/", LoginView.as_view(template_name="frontend/login.html", redirect_authenticated_user=True), name="login"
    ),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("project/", home.project_switch, name="project_switch"),
    path("assets/plotly-<str:release>.js", assets.plotly, name="plotly"),
    path("", home.home, name="home"),
    path("parts/home/", home.home_part, name="home_part"),
    path("runs/", runs.run_list, name="runs"),
    path("runs/new/", new_run.run_new, name="run_new"),
    path("runs/compare/", runs.run_compare, name="run_compare"),
    path("runs/<uuid:run_id>/", runs.run_detail, name="run"),
    path("runs/<uuid:run_id>/series.json", runs.run_series_json, name="run_series"),
    path("runs/<uuid:run_id>/parts/<slug:part>/", runs.run_part, name="run_part"),
    path("runs/<uuid:run_id>/fork/", control.run_fork, name="run_fork"),
    path("runs/<uuid:run_id>/<str:verb>/", control.run_control, name="run_control"),
    path("rollouts/", rollouts.rollout_list, name="rollouts"),
    path("rollouts/<uuid:rollout_id>/", rollouts.rollout_detail, name="rollout"),
    path("lanes/", lanes.lane_list, name="lanes"),
    path("lanes/<uuid:lane_id>/", lanes.lane_detail, name="lane"),
    path("lanes/<uuid:lane_id>/part/", lanes.lane_part, name="lane_part"),
    path("lanes/<uuid:lane_id>/train/", lanes.lane_train_view, name="lane_train"),
    path("lanes/<uuid:lane_id>/propose/<uuid:run_id>/", lanes.release_propose, name="release_propose"),
    path("releases/<uuid:release_id>/<slug:verb>/", lanes.release_control, name="release_control"),
    path("feedback/", feedback.feedback, name="feedback"),
    path("parts/feedback/", feedback.feedback_part, name="feedback_part"),
    path("feedback/rejected/<uuid:payload_id>/", feedback.rejected_replay, name="rejected_replay"),
    path("clusters/", fleet.clusters, name="clusters"),
    path("parts/clusters/", fleet.clusters_part, name="clusters_part"),
    path("task-sets/", catalog.task_set_list, name="task_sets"),
    path("task-sets/<uuid:task_set_id>/", catalog.task_set_detail, name="task_set"),
    path("rubrics/", rubrics.rubric_list, name="rubrics"),
    path("rubrics/new/", rubrics.rubric_new, name="rubric_new"),
    path("rubrics/<slug:slug>/", rubrics.rubric_detail, name="rubric"),
    path("rubrics/<slug:slug>/edit/", rubrics.rubric_edit, name="rubric_edit"),
    path("events/", events.event_list, name="events"),
    path("work/", work.work_list, name="work"),
    path("work/<uuid:unit_id>/", work.work_detail, name="work_unit"),
    path("work/<uuid:unit_id>/replay/", control.work_replay, name="work_replay"),
    path("members/", people.members, name="members"),
    path("keys/", people.keys, name="keys"),
    path("keys/<uuid:key_id>/revoke/", people.key_revoke, name="key_revoke"),
]
