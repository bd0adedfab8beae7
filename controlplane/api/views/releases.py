"""Releases: proposed, steered and decided by people; what their canary's steps showed."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import ReleaseFilter
from controlplane.api.serializers.releases import (
    CanaryStepSerializer,
    ProposeInput,
    ReleaseActionInput,
    ReleaseSerializer,
)
from controlplane.errors import Forbidden, Invalid
from controlplane.models import CanaryStep, Release
from controlplane.permissions import Action
from controlplane.selectors import api_lanes as select
from controlplane.selectors.api_runs import runs_of
from controlplane.services import canaries, promotions, releases


class ReleaseList(Post, ListView):
    """Releases. POST proposes the head of a run."""

    actions = {"GET": Action.READ, "POST": Action.RELEASES_PROPOSE}
    serializer_class = ReleaseSerializer
    input_serializer = ProposeInput
    filterset_class = ReleaseFilter

    def rows(self) -> QuerySet[Release]:
        """Releases."""
        return select.releases_of(self.project)

    def perform(self, data: dict[str, Any]) -> Release:
        """Propose."""
        lane = one(select.lanes_of(self.project), "lane", slug=data["lane"])
        run = one(runs_of(self.project), "run", pk=data["run"])
        if run.lineage.head is None:
            raise Invalid("the run has no version yet", "run")
        release = releases.release_propose(
            lane=lane,
            version=run.lineage.head,
            run=run,
            proposer=self.principal.person,
            actor=self.actor,
            reason=data["reason"],
            supersede=data["supersede"],
        )
        return select.releases_of(self.project).get(pk=release.pk)


class ReleaseDetail(DetailView):
    """One release."""

    serializer_class = ReleaseSerializer

    def row(self) -> Release:
        """The release of the path."""
        release: Release = one(select.releases_of(self.project), "release", pk=self.kwargs["id"])
        return release


class ReleaseSteps(ListView):
    """The steps of a release's canary, the newest first."""

    serializer_class = CanaryStepSerializer

    def rows(self) -> QuerySet[CanaryStep]:
        """Steps."""
        return select.steps_of(one(select.releases_of(self.project), "release", pk=self.kwargs["id"]))


class _ReleaseAction(ActionView):
    """A change of a release; 409 where its state does not allow it, 412 where it moved since it was read."""

    actions = {"POST": Action.RELEASES_ABORT}
    serializer_class = ReleaseSerializer
    input_serializer = ReleaseActionInput
    problems = frozenset({412})

    def perform(self, data: dict[str, Any]) -> Release:
        """Act, then read it again."""
        release = one(select.releases_of(self.project), "release", pk=self.kwargs["id"])
        self.act(release, data)
        return select.releases_of(self.project).get(pk=release.pk)

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Call the service."""
        raise NotImplementedError


class ReleaseApprove(_ReleaseAction):
    """One person's word for it: not the proposer's."""

    actions = {"POST": Action.RELEASES_APPROVE}

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Approve."""
        if self.principal.user is None:
            raise Forbidden("an approval is a person's word: log in")
        releases.release_approve(
            release=release,
            user=self.principal.user,
            actor=self.actor,
            reason=data["reason"],
            expected_revision=data["expected_revision"],
        )


class ReleasePromote(_ReleaseAction):
    """Let the candidate answer users."""

    actions = {"POST": Action.RELEASES_APPROVE}

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Promote."""
        promotions.release_promote(
            release=release, actor=self.actor, reason=data["reason"], expected_revision=data["expected_revision"]
        )


class ReleaseAdvance(_ReleaseAction):
    """The canary's next step without waiting, or past a shadow that is not done. Nothing that was asked is waived."""

    actions = {"POST": Action.RELEASES_PROPOSE}

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Go on."""
        canaries.release_step_on(
            release=release, actor=self.actor, reason=data["reason"], expected_revision=data["expected_revision"]
        )


class ReleasePause(_ReleaseAction):
    """Stand still: no further step, no promotion. A canary's arms stay, and harm still ends it."""

    actions = {"POST": Action.RELEASES_PROPOSE}

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Pause."""
        releases.release_pause(
            release=release, actor=self.actor, reason=data["reason"], expected_revision=data["expected_revision"]
        )


class ReleaseResume(_ReleaseAction):
    """Go on from where it was paused."""

    actions = {"POST": Action.RELEASES_PROPOSE}

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Resume."""
        releases.release_resume(
            release=release, actor=self.actor, reason=data["reason"], expected_revision=data["expected_revision"]
        )


class ReleaseAbort(_ReleaseAction):
    """End a release in flight."""

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Skip it."""
        releases.release_end(
            release=release, actor=self.actor, reason=data["reason"], expected_revision=data["expected_revision"]
        )


class ReleaseRollback(_ReleaseAction):
    """Let the incumbent answer again, all users or those of the canary. The bad version's feedback is quarantined."""

    def act(self, release: Release, data: dict[str, Any]) -> None:
        """Roll back."""
        promotions.release_rollback(
            release=release, actor=self.actor, reason=data["reason"], expected_revision=data["expected_revision"]
        )
