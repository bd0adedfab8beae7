"""The hand-over of one replica to a run's rollouts, and back: the rows, their changes, their events."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TypeGuard

from django.db.models import QuerySet, Value
from django.db.models.functions import Now

from controlplane.models import Lane, Loan, PolicyVersion, ReplicaSlot
from controlplane.services.events import CONDUCTOR, Actor, conductor_nudge, event_append, project_topic
from controlplane.services.fleet import slot_target
from controlplane.services.locks import replica_locked
from controlplane.services.transitions import transition
from controlplane.states import DesiredSource, EventType, LoanState, WeightSlot
from rl_core.lending import LendingSpec, lending_parse

DEFAULT_RETURN_WITHIN_S = 120.0
DEFAULT_SESSIONS = 8


def loans_open() -> QuerySet[Loan]:
    """Loans that are not returned, oldest first."""
    rows = Loan.objects.exclude(state=LoanState.RETURNED)
    return rows.select_related("replica__cluster__lending", "run__lineage__head").order_by("pk")


def loan_open_of(replica_id: uuid.UUID) -> Loan | None:
    """The replica's loan that is not returned. Whoever changes it has locked the replica."""
    return loans_open().filter(replica_id=replica_id).first()


def spec_of_loan(loan: Loan) -> LendingSpec | None:
    """The policy of the loan's cluster, as it is now."""
    policy = getattr(loan.replica.cluster, "lending", None)
    return lending_parse(policy.spec) if policy is not None and policy.spec else None


def loan_call_back(*, replica_id: uuid.UUID, actor: Actor, reason: str) -> Loan | None:
    """Begin no rollout on the replica any more, and tell its slot to hold what it held before.

    While that is on its way rollouts end their turns; the engine ends those that are left when it swaps, and their
    sessions go on elsewhere. None when it is not lent; one that is on its way back already stays so. In the caller's
    transaction.
    """
    replica_locked(replica_id)
    loan = _return_begin(replica_id, actor=actor, reason=reason)
    if loan is None or loan.state != LoanState.RETURNING:
        return loan
    slot = ReplicaSlot.objects.filter(replica=replica_id, slot=loan.slot, desired_source=DesiredSource.LENT).first()
    if slot is not None:
        version, source = _home_of(loan)
        slot_target(
            replica=loan.replica,
            slot=WeightSlot(loan.slot),
            version=version,
            source=source,
            actor=actor,
            reason=f"it was lent: {reason}",
        )
    return loan


def loan_give_up(*, replica_id: uuid.UUID, slot: WeightSlot, reason: str, actor: Actor = CONDUCTOR) -> None:
    """The caller tells the slot to hold something else, in this transaction: so its loan, if it has one, is over."""
    replica_locked(replica_id)
    loan = loan_open_of(replica_id)
    if loan is not None and loan.slot == slot.value:
        _return_begin(replica_id, actor=actor, reason=reason)


def _return_begin(replica_id: uuid.UUID, *, actor: Actor, reason: str) -> Loan | None:
    loan = loan_open_of(replica_id)
    if loan is None or loan.state != LoanState.LENT:
        return loan
    spec = spec_of_loan(loan)
    limit = timedelta(seconds=spec.return_within_s if spec else DEFAULT_RETURN_WITHIN_S)
    transition(
        loan,
        to=LoanState.RETURNING,
        returning_at=Now(),
        return_reason=reason[:500],
        return_by=Now() + Value(limit),
    )
    loan_record(loan, actor=actor, reason=reason)
    return loan


def _home_of(loan: Loan) -> tuple[PolicyVersion | None, DesiredSource | None]:
    """What the slot goes back to: what it held, else what the cluster's users are answered with, else nothing."""
    if version_good(loan.before_version):
        return loan.before_version, DesiredSource(loan.before_source) if loan.before_source else None
    lane = Lane.objects.filter(cluster=loan.replica.cluster_id).select_related("promoted_version").first()
    if lane is not None and version_good(lane.promoted_version):
        return lane.promoted_version, DesiredSource.PROMOTED
    return None, None


def version_good(version: PolicyVersion | None) -> TypeGuard[PolicyVersion]:
    """Whether there is a version, and a replica may hold it."""
    return version is not None and version.quarantined_at is None and version.retired_at is None


def loan_returned(loan: Loan, *, reason: str) -> None:
    """The replica holds no training version any more. In the caller's transaction."""
    transition(loan, to=LoanState.RETURNED, returned_at=Now())
    loan_record(loan, actor=CONDUCTOR, reason=reason)


def loan_record(loan: Loan, *, actor: Actor, reason: str) -> None:
    """Append the loan's present state to its project's log."""
    cluster = loan.replica.cluster
    event_append(
        project_id=cluster.project_id,
        topic=project_topic(cluster.project_id),
        event_type=EventType.LOAN_CHANGED,
        actor=actor,
        reason=reason,
        data={
            "loan": str(loan.pk),
            "replica": str(loan.replica_id),
            "cluster": cluster.slug,
            "name": loan.replica.name,
            "slot": loan.slot,
            "run": str(loan.run_id),
            "state": LoanState(loan.state).value,
        },
    )
    conductor_nudge()
