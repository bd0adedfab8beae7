"""Which replicas may be given requests, said once for all that route."""

from __future__ import annotations

from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from controlplane.models import Loan
from controlplane.states import LoanState, ReplicaState

ANSWERING = (ReplicaState.READY, ReplicaState.RECONCILING)


def there(through: str = "") -> Q:
    """Replicas that count as the fleet's: the operator's, and those whose lease holds by the database's clock."""
    return Q(**{f"{through}lease_until__isnull": True}) | Q(**{f"{through}lease_until__gt": Now()})


def answering(through: str = "") -> Q:
    """Replicas that may be given requests: they answered when they were last looked at, nobody drained them, they
    have a slot that is not faulty, and a lease, where they have one, holds by the database's clock.

    `through` leads from the filtered rows to the replica, such as `replica__`.
    """
    return Q(**{f"{through}state__in": ANSWERING}) & there(through)


def answering_slots() -> Q:
    """For rows of slots: those that may be given requests. A slot that is faulty takes only itself out of routing."""
    return answering("replica__") & Q(fault="")


def on_loan() -> Exists:
    """For rows of slots: whether the slot is lent, or still on its way back. Users' requests never go there."""
    open_loans = Loan.objects.exclude(state=LoanState.RETURNED)
    return Exists(open_loans.filter(replica=OuterRef("replica"), slot=OuterRef("slot")))
