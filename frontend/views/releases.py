"""One release: all that it went through, and what people do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.models import Release
from controlplane.permissions import Action
from controlplane.selectors.pages_blast import blast_of_release
from controlplane.selectors.pages_pipeline import pipeline_of
from controlplane.selectors.pages_releases import release_history, release_view, releases_of
from controlplane.services import canaries, promotions
from controlplane.services import releases as services
from controlplane.services.events import lane_topic
from frontend.access import Access, access_of, page
from frontend.acts import Act, ask, require
from frontend.frame import follow, show
from frontend.looks import version_name
from frontend.queries import choice_of

Perform = Callable[[Release, Access, str, int | None], object]


def release_of(request: HttpRequest, release_id: UUID) -> tuple[Access, Release]:
    """A release and the user's access to its project. Raises: Http404."""
    release = releases_of(Q(pk=release_id)).first()
    if release is None:
        raise Http404("there is no such release")
    return access_of(request, release.lane.project_id), release


@require_safe
@page()
def release_detail(request: HttpRequest, _access: Access, release_id: UUID) -> HttpResponse:
    """One release, whole."""
    access, release = release_of(request, release_id)
    live = follow(access, lane_topic(release.lane_id))
    flight = release_view(release)
    slots = list(release.cadence_slots.all())
    context: dict[str, Any] = {
        "release": release,
        "lane": release.lane,
        "flight": flight,
        "pipeline": pipeline_of(release.lane, flight.spec, slots, [release]),
        "history": release_history(release),
    }
    return show(
        request,
        access,
        "frontend/release.html",
        context,
        section="lanes",
        live=live,
        part="frontend/release_part.html",
    )


@dataclass(frozen=True, slots=True)
class Verb:
    """One act on a release."""

    label: str
    done: str
    explains: str
    action: Action
    perform: Perform
    dangerous: bool = False


VERBS: dict[str, Verb] = {
    "approve": Verb(
        "Approve",
        "has your approval",
        "Your word that this version may answer users. A proposer cannot approve their own release.",
        Action.RELEASES_APPROVE,
        lambda release, access, reason, revision: services.release_approve(
            release=release, user=access.user, actor=access.actor, reason=reason, expected_revision=revision
        ),
    ),
    "promote": Verb(
        "Promote",
        "answers all users of the lane now",
        "All new requests of the lane go to this version at once. The incumbent stays loaded for a rollback.",
        Action.RELEASES_APPROVE,
        lambda release, access, reason, revision: promotions.release_promote(
            release=release, actor=access.actor, reason=reason, expected_revision=revision
        ),
    ),
    "advance": Verb(
        "Next step",
        "goes on to its next step",
        "The next share of users, without waiting. What has to be shown before a promotion is not waived.",
        Action.RELEASES_PROPOSE,
        lambda release, access, reason, revision: canaries.release_step_on(
            release=release, actor=access.actor, reason=reason, expected_revision=revision
        ),
    ),
    "pause": Verb(
        "Pause",
        "stands still",
        "No further step and no promotion until somebody resumes it. A canary's users keep their arm, and harm that is "
        "shown still ends it.",
        Action.RELEASES_PROPOSE,
        lambda release, access, reason, revision: services.release_pause(
            release=release, actor=access.actor, reason=reason, expected_revision=revision
        ),
    ),
    "resume": Verb(
        "Resume",
        "goes on",
        "The release goes on from where it was paused.",
        Action.RELEASES_PROPOSE,
        lambda release, access, reason, revision: services.release_resume(
            release=release, actor=access.actor, reason=reason, expected_revision=revision
        ),
    ),
    "abort": Verb(
        "Abort",
        "is ended",
        "The release ends here, without a judgement: its version may be proposed again.",
        Action.RELEASES_ABORT,
        lambda release, access, reason, revision: services.release_end(
            release=release, actor=access.actor, reason=reason, expected_revision=revision
        ),
        dangerous=True,
    ),
    "rollback": Verb(
        "Roll back",
        "is rolled back",
        "New requests go to the version before. Feedback on this version is quarantined: nothing is trained on it, and "
        "its descendants are marked.",
        Action.RELEASES_ABORT,
        lambda release, access, reason, revision: promotions.release_rollback(
            release=release, actor=access.actor, reason=reason, expected_revision=revision
        ),
        dangerous=True,
    ),
}


@require_http_methods(["GET", "POST"])
@page()
def release_control(request: HttpRequest, _access: Access, release_id: UUID, verb: str) -> HttpResponse:
    """Approve, promote, step on, pause, resume, abort or roll back a release."""
    access, release = release_of(request, release_id)
    chosen = VERBS.get(verb)
    if chosen is None:
        raise Http404("nothing like that can be done with a release")
    require(access, chosen.action)
    from_lane = choice_of(request.GET, "from", ["lane"]) == "lane"
    name = version_name(release.version)
    act = Act(
        title=f"{chosen.label}: version {name} on {release.lane.slug}",
        explains=chosen.explains,
        label=chosen.label,
        back=reverse("lane", args=[release.lane_id]) if from_lane else reverse("release", args=[release.pk]),
        section="lanes",
        perform=lambda reason, revision: chosen.perform(release, access, reason, revision),
        done=f"Version {name} {chosen.done}",
        dangerous=chosen.dangerous,
        blast=blast_of_release(release, verb) if verb != "approve" else None,
        revision=release.revision,
    )
    return ask(request, access, act)
