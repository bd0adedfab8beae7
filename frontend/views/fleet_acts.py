"""Acts on replicas, each with a reason, and what a cluster and its lending are set to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from controlplane.errors import Invalid
from controlplane.models import Cluster, PolicyVersion, Replica, Run
from controlplane.permissions import Action
from controlplane.selectors.pages_lending import lender_of
from controlplane.selectors.pages_replica import blast_of_replica, borrowers, pinnable, slots_of
from controlplane.services import fleet, forgetting, lending, steering
from controlplane.states import WeightSlot
from frontend.access import Access, access_of, page
from frontend.acts import Act, Choice, ask, reason_of, require
from frontend.forms.cluster import ClusterForm
from frontend.forms.lending import LendingForm
from frontend.frame import show
from frontend.looks import version_name
from frontend.outcomes import refusals
from frontend.queries import uuid_of
from frontend.templatetags.slipway import ago_text


@dataclass(frozen=True, slots=True)
class Verb:
    """One act on a replica. `perform` gets the request for what was chosen."""

    label: str
    done: str
    explains: str
    perform: Callable[[HttpRequest, Access, Replica, str], object]
    choices: Callable[[Replica], tuple[Choice, ...]] = lambda _: ()
    dangerous: bool = False


def _slot(request: HttpRequest) -> WeightSlot:
    value = request.POST.get("slot", "")
    if value not in set(WeightSlot):
        raise Invalid("choose one of the replica's slots", "slot")
    return WeightSlot(value)


def _pin(request: HttpRequest, access: Access, replica: Replica, reason: str) -> None:
    chosen = uuid_of(request.POST, "version")
    version = PolicyVersion.objects.filter(pk=chosen, lineage__project=access.project).first() if chosen else None
    if version is None:
        raise Invalid("choose one of the versions", "version")
    steering.replica_pin(replica=replica, slot=_slot(request), version=version, actor=access.actor, reason=reason)


def _unpin(request: HttpRequest, access: Access, replica: Replica, reason: str) -> None:
    steering.replica_unpin(replica=replica, slot=_slot(request), actor=access.actor, reason=reason)


def _lend(request: HttpRequest, access: Access, replica: Replica, reason: str) -> None:
    chosen = uuid_of(request.POST, "run")
    run = Run.objects.filter(pk=chosen, project=access.project).first() if chosen else None
    if run is None:
        raise Invalid("choose one of the running runs", "run")
    lending.replica_lend(replica=replica, run=run, actor=access.actor, reason=reason)


def _plain(service: Callable[..., object]) -> Callable[[HttpRequest, Access, Replica, str], object]:
    return lambda _, access, replica, reason: service(replica=replica, actor=access.actor, reason=reason)


def _slot_choice(replica: Replica, *, pinned: bool) -> Choice:
    return Choice("slot", "Slot", [(slot, slot) for slot in slots_of(replica, pinned=pinned)])


def _pin_choices(replica: Replica) -> tuple[Choice, ...]:
    versions = [(str(version.pk), _version_words(version)) for version in pinnable(replica)]
    told = "the newest of the cluster's model" if versions else "no version of the cluster's model stands yet"
    return (_slot_choice(replica, pinned=False), Choice("version", "Version", versions, told))


def _version_words(version: PolicyVersion) -> str:
    run: Run | None = getattr(version.lineage, "run", None)
    of = f" of {run.name}" if run is not None else ""
    when = f", {ago_text(version.committed_at, timezone.now())}" if version.committed_at else ""
    return f"{version_name(version)}{of}{when}"


def _lend_choices(replica: Replica) -> tuple[Choice, ...]:
    runs = [(str(run.pk), run.name) for run in borrowers(replica.cluster)]
    told = "its training head is what the slot will hold" if runs else "no run that trains this model rolls out now"
    return (Choice("run", "To run", runs, told),)


VERBS: dict[str, Verb] = {
    "pin": Verb(
        "Pin",
        "is pinned",
        "The slot holds that version, whatever its run or its lane does, until somebody unpins it.",
        _pin,
        _pin_choices,
    ),
    "unpin": Verb(
        "Unpin",
        "is unpinned",
        "The slot goes on holding what it has until whoever drives its cluster says what comes next.",
        _unpin,
        lambda replica: (_slot_choice(replica, pinned=True),),
    ),
    "drain": Verb(
        "Drain",
        "is taken out",
        "It finishes what it has and is given nothing new, over restarts, until somebody undrains it. Weights go on "
        "reaching it.",
        _plain(steering.replica_drain),
        dangerous=True,
    ),
    "undrain": Verb(
        "Undrain", "is given requests again", "It is given requests again.", _plain(steering.replica_undrain)
    ),
    "repair": Verb(
        "Repair",
        "fetches its weights anew",
        "It fetches what it should hold from snapshots, whatever it holds, and answers again once its root is right.",
        _plain(steering.replica_repair),
    ),
    "forget": Verb(
        "Forget",
        "is forgotten",
        "It leaves the fleet with its transfers and loans; the events about it stay. If its engine registers again, it "
        "is a new replica.",
        _plain(forgetting.replica_forget),
        dangerous=True,
    ),
    "lend": Verb(
        "Lend",
        "is lent",
        "It goes on answering users first. Its spare slot takes the run's training head, until it is called back by a "
        "person, by rising load, by a release, or at the run's end.",
        _lend,
        _lend_choices,
    ),
    "return": Verb(
        "Return",
        "is called back",
        "No rollout begins on it any more, and its slot goes back to what it held before. What is left when it swaps "
        "goes on elsewhere.",
        _plain(lending.replica_return),
    ),
}


@require_http_methods(["GET", "POST"])
@page()
def replica_act(request: HttpRequest, _access: Access, replica_id: UUID, verb: str) -> HttpResponse:
    """Pin, unpin, drain, undrain, repair, forget, lend, return."""
    replica = Replica.objects.select_related("cluster").filter(pk=replica_id).first()
    if replica is None:
        raise Http404("there is no such replica")
    access = access_of(request, replica.cluster.project_id)
    require(access, Action.FLEET_CONTROL)
    chosen = VERBS.get(verb)
    if chosen is None:
        raise Http404("a replica is pinned, unpinned, drained, undrained, repaired, forgotten, lent or returned")
    name = f"{replica.cluster.slug}/{replica.name}"
    act = Act(
        title=f"{chosen.label} {name}",
        explains=chosen.explains,
        label=chosen.label,
        back=reverse("clusters") + f"#replica-{replica.pk}",
        section="clusters",
        perform=lambda reason, _: chosen.perform(request, access, replica, reason),
        done=f"{name} {chosen.done}",
        dangerous=chosen.dangerous,
        blast=blast_of_replica(replica, verb),
        choices=chosen.choices(replica),
    )
    return ask(request, access, act)


@require_http_methods(["GET", "POST"])
@page(Action.FLEET_CONTROL)
def lending_allow(request: HttpRequest, access: Access) -> HttpResponse:
    """Allow the project's rollouts on replicas that serve users, or forbid it."""
    allow = not access.project.lending_allowed
    act = Act(
        title="Allow lending" if allow else "Forbid lending",
        explains=(
            "Runs of this project may roll out on replicas that serve users, by each cluster's policy or by hand. "
            "Users come first on them, and none is answered by a training version."
            if allow
            else "Nothing more is lent in this project, and what is lent is called back."
        ),
        label="Allow" if allow else "Forbid",
        back=reverse("clusters") + "#lending-title",
        section="clusters",
        perform=lambda reason, _: lending.lending_allow(
            project=access.project, allowed=allow, actor=access.actor, reason=reason
        ),
        done=f"Lending is {'allowed' if allow else 'forbidden'} in this project",
        dangerous=not allow,
    )
    return ask(request, access, act)


def _cluster_of(request: HttpRequest, cluster_id: UUID) -> tuple[Access, Cluster]:
    cluster = Cluster.objects.select_related("project").filter(pk=cluster_id).first()
    if cluster is None:
        raise Http404("there is no such cluster")
    access = access_of(request, cluster.project_id)
    require(access, Action.FLEET_CONTROL)
    return access, cluster


@require_http_methods(["GET", "POST"])
@page()
def lending_settings(request: HttpRequest, _access: Access, cluster_id: UUID) -> HttpResponse:
    """When a serving cluster lends."""
    access, cluster = _cluster_of(request, cluster_id)
    lender = lender_of(cluster)
    if lender is None:
        raise Http404("only serving clusters lend")
    posted = request.method == "POST"
    form = LendingForm.of_post(request.POST) if posted else LendingForm.of_policy(lender)
    if posted:
        spec = form.spec()
        reason = reason_of(request, form.problems)
        if not form.problems:
            with refusals(form.problems):
                lending.lending_set(cluster=cluster, spec=spec, enabled=form.enabled, actor=access.actor, reason=reason)
                messages.success(request, f"{cluster.slug} lends by its new policy" if form.enabled else "It is off")
                return redirect(reverse("clusters") + "#lending-title")
    context = {"cluster": cluster, "form": form, "reason": request.POST.get("reason", "")}
    status = 422 if form.problems else 200
    return show(request, access, "frontend/lending_settings.html", context, section="clusters", status=status)


@require_http_methods(["GET", "POST"])
@page()
def cluster_settings(request: HttpRequest, _access: Access, cluster_id: UUID) -> HttpResponse:
    """A cluster's capacity, the limit of its link, what its engines run on and what that costs."""
    access, cluster = _cluster_of(request, cluster_id)
    posted = request.method == "POST"
    form = ClusterForm.of_post(request.POST) if posted else ClusterForm.of_cluster(cluster)
    if posted:
        changes = form.changes(cluster)
        reason = reason_of(request, form.problems)
        if not form.problems:
            with refusals(form.problems, {**{name: name for name in changes}, "bandwidth_bytes_s": "bandwidth_mbit"}):
                if changes:
                    fleet.cluster_configure(cluster=cluster, actor=access.actor, reason=reason, **changes)
                messages.success(request, f"{cluster.slug} is set" if changes else "Nothing was changed")
                return redirect(reverse("clusters") + f"#cluster-{cluster.pk}")
    context = {"cluster": cluster, "form": form, "reason": request.POST.get("reason", "")}
    status = 422 if form.problems else 200
    return show(request, access, "frontend/cluster_settings.html", context, section="clusters", status=status)
