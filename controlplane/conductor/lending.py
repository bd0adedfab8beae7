"""Lending by policy: one replica more when its cluster has been quiet for long, all of them back when it is not.

Each look decides from the rows alone. Whatever is not known speaks for the users: a load that cannot be read lends
nothing, and calls back what is lent when it has not been read for `STALE_S`. A new policy has as long to read it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

from django.db import transaction
from django.db.models.functions import Now

from controlplane.conductor.loads import load_of
from controlplane.conductor.looks import Looks
from controlplane.errors import Unavailable
from controlplane.models import Alert, LendingPolicy, Loan, Replica, ReplicaSlot, Transfer
from controlplane.selectors.answering import answering
from controlplane.services.alerts import alert_raise
from controlplane.services.clock import database_now
from controlplane.services.events import CONDUCTOR
from controlplane.services.lending import (
    answering_unlent,
    lending_problem,
    loan_follow,
    replica_lend,
    run_problem,
    run_that_borrows,
    spare_slot,
)
from controlplane.services.loans import loan_call_back, loan_open_of, loan_record, loan_returned, loans_open
from controlplane.services.locks import replica_locked
from controlplane.services.replica_reports import idle_in
from controlplane.states import UNDER_WAY, AlertKind, DesiredSource, LoanState
from rl_core.lending import LendingSpec, LoadSource, lending_parse, open_until

STALE_S = 60.0

_loans, _policies = Looks("loan"), Looks("lending policy")


def loans_advance() -> None:
    """Every loan that is not returned: called back when it must be, kept at its run's head, or taken back."""
    for loan in loans_open():
        _loans.at(loan.pk, partial(loan_advance, loan))


@transaction.atomic
def loan_advance(loan: Loan) -> None:
    """One look at one loan."""
    replica_locked(loan.replica_id)
    locked = loan_open_of(loan.replica_id)
    if locked is None or locked.pk != loan.pk:
        return
    if locked.state == LoanState.RETURNING:
        _settle(locked)
        return
    reason = must_return(locked)
    if reason:
        loan_call_back(replica_id=locked.replica_id, actor=CONDUCTOR, reason=reason)
    else:
        loan_follow(locked, actor=CONDUCTOR)


def _settle(loan: Loan) -> None:
    """The loan is over once the slot holds what it is told to hold; with nothing to hold, once nothing runs there."""
    slot = ReplicaSlot.objects.filter(replica=loan.replica_id, slot=loan.slot).first()
    if slot is None:
        loan_returned(loan, reason="the slot is gone")
    elif slot.desired_version_id is not None:
        if _arrived(slot):
            loan_returned(loan, reason="its slot holds no training version any more")
        elif _overdue(loan):
            _complain(loan)
    elif _idle_since(loan) or _overdue(loan):
        loan_returned(loan, reason="nothing rolls out on it any more")


def _arrived(slot: ReplicaSlot) -> bool:
    """Whether the slot holds what it is told to, and goes on holding it: nothing from before is on its way."""
    here = {"replica": slot.replica_id, "slot": slot.slot}
    if Transfer.objects.filter(state__in=UNDER_WAY, **here).exists():
        return False
    told = slot.reported_at is not None and slot.desired_at is not None and slot.reported_at > slot.desired_at
    return told and slot.current_version_id == slot.desired_version_id and slot.desired_source != DesiredSource.LENT


def _idle_since(loan: Loan) -> bool:
    """Whether the replica was seen since it was called back, with nothing running in the lent slot."""
    seen, asked = loan.replica.seen_at, loan.returning_at
    return seen is not None and asked is not None and seen > asked and idle_in(loan.replica.metrics, loan.slot)


def _overdue(loan: Loan) -> bool:
    return loan.return_by is not None and loan.return_by <= database_now()


def _complain(loan: Loan) -> None:
    """Call a person once: the replica goes on answering users, but its spare slot is not theirs yet."""
    if Alert.objects.filter(kind=AlertKind.LOAN_OVERDUE, subject=str(loan.pk)).exists():
        return
    cluster = loan.replica.cluster
    about = f"{cluster.slug}/{loan.replica.name}"
    reason = (
        f"slot {loan.slot} holds a training version still; it was called back to be free at "
        f"{loan.return_by:%H:%M:%S} UTC ({loan.return_reason}); see the transfers to it"
    )
    detail = {"about": about, "reason": reason, "run": str(loan.run_id), "replica": str(loan.replica_id)}
    alert_raise(lane=None, project=cluster.project, kind=AlertKind.LOAN_OVERDUE, subject=str(loan.pk), detail=detail)
    loan_record(loan, actor=CONDUCTOR, reason=f"overdue: {reason}")


def must_return(loan: Loan) -> str:
    """Why a loan has to end now; empty while it may go on. What a person lent knows no hours and no settling."""
    replica, cluster = loan.replica, loan.replica.cluster
    if not ReplicaSlot.objects.filter(replica=replica, slot=loan.slot).exists():
        return "its slot is gone"
    problem = lending_problem(cluster) or run_problem(loan.run)
    if problem:
        return problem
    if not Replica.objects.filter(answering(), pk=replica.pk).exists():
        return f"the replica is {replica.state}"
    policy = LendingPolicy.objects.filter(cluster=cluster).first()
    spec = lending_parse(policy.spec) if policy is not None else None
    busy = _busy(policy, spec) if policy is not None and spec is not None else ""
    if busy or loan.by_hand:
        return busy
    if policy is None or spec is None or not policy.enabled:
        return "the policy is turned off"
    return _closing(spec, database_now())


def _busy(policy: LendingPolicy, spec: LendingSpec) -> str:
    """What the load says against lending; nothing where no load is watched."""
    if spec.source is LoadSource.NONE or not policy.enabled:
        return ""
    now = database_now()
    if policy.load_at is None or now - policy.load_at > timedelta(seconds=STALE_S):
        return f"its load is not known: {policy.load_error or 'it was not read yet'}"
    if policy.load is not None and policy.load > spec.return_above:
        return f"its load is {policy.load:.4g}, above {spec.return_above:g}"
    return ""


def _closing(spec: LendingSpec, now: datetime) -> str:
    """Whether no window is open, or the one that is ends before a replica that is called back would be back."""
    end = open_until(spec, now)
    if end is None:
        return "no window of the policy is open"
    if end - now <= timedelta(seconds=spec.return_within_s):
        return f"its window ends at {end.astimezone(UTC):%H:%M} UTC"
    return ""


def policies_look() -> None:
    """Read each policy's load, and lend one replica more where it says so."""
    for policy in LendingPolicy.objects.filter(enabled=True).select_related("cluster__project").order_by("pk"):
        _policies.at(policy.pk, partial(policy_look, policy))


def policy_look(policy: LendingPolicy) -> Loan | None:
    """One look at one policy; what it lent. The load is read outside any transaction: it may take seconds."""
    spec = lending_parse(policy.spec)
    if spec.source is not LoadSource.NONE:
        _read_load(policy, spec)
    with transaction.atomic():
        rows = LendingPolicy.objects.select_for_update(of=("self",), no_key=True).select_related("cluster__project")
        locked = rows.filter(pk=policy.pk, enabled=True).first()
        if locked is None or locked.spec != policy.spec:
            return None  # it was changed meanwhile: the next look goes by what it says now
        note, lent = _decide(locked, spec)
        if note != locked.note:
            LendingPolicy.objects.filter(pk=locked.pk).update(note=note[:500])
    return lent


def _read_load(policy: LendingPolicy, spec: LendingSpec) -> None:
    rows = LendingPolicy.objects.filter(pk=policy.pk, spec=policy.spec)
    try:
        load = load_of(policy.cluster, spec)
    except Unavailable as error:
        rows.update(load=None, load_error=error.message[:500], quiet_since=None)
        return
    rows.update(load=load, load_at=Now(), load_error="")
    if load >= spec.lend_below:
        rows.update(quiet_since=None)
    else:
        rows.filter(quiet_since__isnull=True).update(quiet_since=Now())


def _decide(policy: LendingPolicy, spec: LendingSpec) -> tuple[str, Loan | None]:
    """What the policy waits for now, or what it lent."""
    cluster, now = policy.cluster, database_now()
    problem = lending_problem(cluster) or _busy(policy, spec) or _closing(spec, now) or _not_quiet(policy, spec, now)
    if problem:
        return problem, None
    run = run_that_borrows(cluster)
    if run is None:
        return "no run of its model rolls out now", None
    if answering_unlent(cluster) <= spec.keep:
        return f"{spec.keep} replica(s) are kept for users", None
    reasons = []
    lent = cluster.replicas.filter(loans__in=loans_open().values("pk")).values("pk")
    for replica in Replica.objects.filter(answering(), cluster=cluster).exclude(pk__in=lent).order_by("name"):
        slot, why = spare_slot(replica)
        if slot is None:
            reasons.append(f"{replica.name}: {why}")
            continue
        loan = replica_lend(replica=replica, run=run, actor=CONDUCTOR, reason=_why(policy, spec), by_hand=False)
        # One at a time: the load of those that are left is looked at before the next.
        LendingPolicy.objects.filter(pk=policy.pk).update(quiet_since=Now())
        return f"lent {replica.name} to run {run.name}", loan
    return "; ".join(reasons) or "all that may be lent is lent", None


def _not_quiet(policy: LendingPolicy, spec: LendingSpec, now: datetime) -> str:
    if spec.source is LoadSource.NONE:
        return ""
    if policy.quiet_since is None:
        return f"its load is {policy.load:.4g}, not below {spec.lend_below:g}" if policy.load is not None else "no load"
    left_s = spec.settle_s - (now - policy.quiet_since).total_seconds()
    return f"its load is {policy.load or 0:.4g}: quiet for {spec.settle_s:g} s first" if left_s > 0 else ""


def _why(policy: LendingPolicy, spec: LendingSpec) -> str:
    said = []
    if spec.source is not LoadSource.NONE:
        said.append(f"its load was below {spec.lend_below:g} for {spec.settle_s:g} s: {policy.load or 0:.4g} now")
    if spec.windows:
        said.append("a window of the policy is open")
    return "; ".join(said)
