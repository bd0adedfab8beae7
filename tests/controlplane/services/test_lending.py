"""Replicas lent to rollouts: who may be lent to whom, what becomes of the slot, and the way back."""

from datetime import timedelta

import pytest
from django.db.models import F
from django.db.models.functions import Now

from controlplane.conductor.lending import loan_advance, loans_advance, must_return, policies_look
from controlplane.errors import Conflict, Invalid, Unavailable
from controlplane.models import (
    Alert,
    Event,
    Lane,
    LendingPolicy,
    Loan,
    PolicyVersion,
    Project,
    Release,
    Replica,
    ReplicaSlot,
    Run,
    ServedVersion,
    Transfer,
    WorkUnit,
)
from controlplane.selectors.lane_routes import lane_route
from controlplane.selectors.rollout_plans import places
from controlplane.selectors.run_clusters import sessions_lent
from controlplane.services.fleet import replica_register
from controlplane.services.lending import lending_allow, lending_set, replica_lend, replica_return
from controlplane.services.residency import candidate_load, promoted_place
from controlplane.services.steering import replica_drain, replica_pin
from controlplane.services.transfers import transfer_begin
from controlplane.states import (
    AlertKind,
    Arm,
    DesiredSource,
    EventType,
    LoanState,
    ReplicaState,
    RunState,
    TransferState,
    WeightSlot,
)
from tests.domain_factories import TESTER, make_cluster
from tests.lane_rows import candidate_version
from tests.lending_rows import ALWAYS, BY_LOAD, lending_world
from tests.simulated_workers import claim_of

pytestmark = pytest.mark.django_db

HOURS_2, LONG = timedelta(hours=2), timedelta(minutes=5)


def lend(world, replica=None):
    return replica_lend(replica=replica or world.replica, run=world.run, actor=TESTER, reason="the night is quiet")


def lent_places(world):
    return [place for place in places({world.project.pk}) if place.lent_to is not None]


def test_a_lent_replica_takes_the_training_head_in_its_spare_slot_and_follows_it():
    world = lending_world()
    loan = lend(world)
    slot = world.slot()
    assert (slot.desired_version, slot.desired_source) == (world.run.lineage.head, DesiredSource.LENT)
    assert world.slot("default").desired_version == world.lane.promoted_version
    assert (loan.state, loan.by_hand, sessions_lent(world.run)) == (LoanState.LENT, True, loan.sessions)
    newer = world.next_head()
    loans_advance()
    assert world.slot().desired_version == newer
    told = Event.objects.filter(type=EventType.LOAN_CHANGED).get()
    assert (told.actor, told.reason, told.data["state"]) == (TESTER.name, "the night is quiet", "lent")


def test_users_never_meet_the_lent_slot_and_rollouts_no_other(settings, tmp_path):
    settings.REPLICA_TOKEN_DIR = tmp_path
    world = lending_world(replicas=1)
    (tmp_path / f"{world.replica.pk}.inference").write_text("secret")
    lend(world)
    world.arrive()
    # Even when the training head is what users are answered with: it moves on under them.
    ReplicaSlot.objects.filter(replica=world.replica).update(current_version=world.lane.promoted_version)
    route = lane_route(project_id=world.project.pk, slug="assistant")
    assert [seat.slot for seat in route.promoted.seats] == ["default"]
    found = lent_places(world)
    assert [(place.slot, place.lent_to, place.background) for place in found] == [("candidate", world.run.pk, True)]
    replica_return(replica=world.replica, actor=TESTER, reason="morning")
    assert lent_places(world) == []
    slots = {place.slot for place in places({world.project.pk}) if place.replica_id == world.replica.pk}
    assert slots == {"default"}  # on its way back it is nobody's place


def test_the_way_back_ends_when_the_slot_holds_no_training_version():
    world = lending_world()
    before = candidate_version_of(world)
    ReplicaSlot.objects.filter(pk=world.slot().pk).update(
        desired_version=before, current_version=before, desired_source=DesiredSource.CANDIDATE
    )
    loan = lend(world)
    world.arrive()
    replica_return(replica=world.replica, actor=TESTER, reason="morning")
    slot = world.slot()
    assert (slot.desired_version, slot.desired_source) == (before, DesiredSource.CANDIDATE)
    loans_advance()
    loan.refresh_from_db()
    assert (loan.state, loan.return_reason) == (LoanState.RETURNING, "morning")
    assert loan.return_by > loan.returning_at
    world.arrive()
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNED
    assert loan.returned_at is not None
    lend(world)  # and may be lent again


def test_it_is_not_back_while_what_was_on_its_way_could_still_come():
    world = lending_world()
    home = world.lane.promoted_version  # in both slots, as after a promotion
    ReplicaSlot.objects.filter(pk=world.slot().pk).update(
        desired_version=home, current_version=home, desired_source="promoted", reported_at=Now()
    )
    head = world.next_head()
    loan = lend(world)
    transfer = Transfer.objects.get(version=head)
    transfer_begin(claim_of(WorkUnit.objects.get(ref=transfer.pk)))  # the engine was told, and is at it
    replica_return(replica=world.replica, actor=TESTER, reason="morning")
    transfer.refresh_from_db()
    assert (transfer.state, world.slot().current_version) == (TransferState.SUPERSEDED, home)
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNING
    ReplicaSlot.objects.filter(pk=world.slot().pk).update(current_version=head)
    Transfer.objects.filter(version=home).update(state=TransferState.DONE)
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNING  # the engine went through with it
    ReplicaSlot.objects.filter(pk=world.slot().pk).update(current_version=home, desired_at=Now())
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNING  # it was told anew, and not seen since
    world.arrive()
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNED


def test_with_nothing_to_hold_it_is_back_when_it_was_seen_idle_since():
    world = lending_world()
    loan = lend(world)
    PolicyVersion.objects.filter(pk=world.lane.promoted_version_id).update(quarantined_at=Now())
    idle = {"slots": {"candidate": {"running": 0, "waiting": 0}}}
    Replica.objects.filter(pk=world.replica.pk).update(metrics=idle, seen_at=Now())
    replica_return(replica=world.replica, actor=TESTER, reason="morning")
    assert world.slot().desired_version is None
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNING
    Replica.objects.filter(pk=world.replica.pk).update(seen_at=Now())
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNED


def test_a_person_is_called_once_for_a_replica_that_is_not_back_in_time():
    world = lending_world()
    loan = lend(world)
    replica_return(replica=world.replica, actor=TESTER, reason="morning")
    loans_advance()
    assert not Alert.objects.exists()
    Loan.objects.update(return_by=Now(), returning_at=Now() - LONG)
    for _ in range(2):
        loans_advance()
        alert = Alert.objects.get()
        assert (alert.kind, alert.subject) == (AlertKind.LOAN_OVERDUE, str(loan.pk))
        assert alert.detail["about"] == "serving/serving-0"
        Alert.objects.update(resolved_at=Now())
    told = Event.objects.filter(type=EventType.LOAN_CHANGED, reason__startswith="overdue: slot candidate holds")
    assert told.count() == 1
    world.arrive()
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNED


def test_a_lent_slot_that_is_gone_ends_its_loan():
    world = lending_world()
    loan = lend(world)
    replica_register(
        cluster=world.cluster, name=world.replica.name, inference_url="http://127.0.0.1:1",
        control_url="http://127.0.0.1:2", weight_slots=1, actor=TESTER,
    )  # fmt: skip
    loans_advance()
    loan.refresh_from_db()
    assert (loan.return_reason, sessions_lent(world.run)) == ("its slot is gone", 0)
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNED


def candidate_version_of(world):
    return candidate_version(type("World", (), {"project": world.project, "model": world.run.lineage.model}))


def test_what_held_nothing_before_goes_back_to_what_users_are_answered_with():
    world = lending_world()
    lend(world)
    replica_return(replica=world.replica, actor=TESTER, reason="morning")
    assert (world.slot().desired_version, world.slot().desired_source) == (
        world.lane.promoted_version,
        DesiredSource.PROMOTED,
    )


def test_a_version_found_bad_meanwhile_is_not_gone_back_to():
    world = lending_world()
    before = candidate_version_of(world)
    ReplicaSlot.objects.filter(pk=world.slot().pk).update(desired_version=before, current_version=before)
    lend(world)
    PolicyVersion.objects.filter(pk=before.pk).update(quarantined_at=Now())
    replica_return(replica=world.replica, actor=TESTER, reason="morning")
    assert world.slot().desired_version == world.lane.promoted_version


def refused(world, replica=None, *, because):
    with pytest.raises(Conflict, match=because):
        lend(world, replica)
    assert not Loan.objects.exclude(state=LoanState.RETURNED).exists()


def test_what_stands_against_lending_is_said():
    world = lending_world()
    lending_allow(project=world.project, allowed=False, actor=TESTER, reason="not yet")
    refused(world, because="does not allow")
    Project.objects.update(lending_allowed=True)
    refused(world, make_cluster(world.project, slug="north").replicas.get(), because="only serving clusters")
    Run.objects.update(state=RunState.PAUSED)
    world.run.refresh_from_db()
    refused(world, because="is paused")
    Run.objects.update(state=RunState.RUNNING)
    world.run.refresh_from_db()
    Replica.objects.filter(pk=world.replica.pk).update(state=ReplicaState.DRAINED)
    refused(world, because="is drained")
    Replica.objects.update(state=ReplicaState.READY, lease_until=Now())
    refused(world, because="nothing to lend")
    Replica.objects.update(lease_until=None)
    ReplicaSlot.objects.filter(pk=world.slot().pk).update(desired_source=DesiredSource.PINNED)
    refused(world, because="pinned")
    ReplicaSlot.objects.update(desired_source="", current_version=None)
    refused(world, because="does not hold what its users")


def test_one_slot_is_not_lent():
    refused(lending_world(weight_slots=1), because="it has one slot")


def test_the_version_that_answered_before_stays_for_an_hour():
    world = lending_world()
    before = candidate_version_of(world)
    ReplicaSlot.objects.filter(pk=world.slot().pk).update(desired_version=before, current_version=before)
    served = ServedVersion.objects.create(lane=world.lane, arm=Arm.PROMOTED, version=before, until=Now())
    refused(world, because="for a rollback")
    ServedVersion.objects.filter(pk=served.pk).update(until=F("until") - HOURS_2)
    lend(world)


def test_a_release_in_flight_needs_the_spare_slots():
    world = lending_world()
    loan = lend(world)
    version = candidate_version_of(world)
    Release.objects.create(lane=world.lane, version=version, reason="x", state="gating")
    assert "release of lane assistant" in must_return(loan)
    candidate_load(lane=world.lane, version=version, actor=TESTER, reason="a candidate")
    loan.refresh_from_db()
    assert (loan.state, loan.return_reason) == (LoanState.RETURNING, "a candidate")
    assert (world.slot().desired_version, world.slot().desired_source) == (version, DesiredSource.CANDIDATE)
    world.arrive()
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNED
    Release.objects.update(state="gating")
    refused(world, because="release of lane")


def test_a_lane_that_needs_the_slot_takes_it_back():
    world = lending_world(replicas=1)
    loan = lend(world)
    other = candidate_version_of(world)
    ReplicaSlot.objects.filter(pk=world.slot("default").pk).update(desired_source=DesiredSource.PINNED)
    Lane.objects.update(promoted_version=other)
    world.lane.refresh_from_db()
    assert promoted_place(lane=world.lane) == 1
    loan.refresh_from_db()
    assert (world.slot().desired_version, loan.state) == (other, LoanState.RETURNING)


def test_pinning_and_draining_end_a_loan():
    world = lending_world()
    first, second = lend(world), lend(world, world.replicas[1])
    version = candidate_version_of(world)
    replica_pin(replica=world.replica, slot=WeightSlot.CANDIDATE, version=version, actor=TESTER, reason="look at it")
    replica_drain(replica=world.replicas[1], actor=TESTER, reason="new disks")
    for loan in (first, second):
        loan.refresh_from_db()
        assert loan.state == LoanState.RETURNING
    assert (world.slot().desired_version, world.slot().desired_source) == (version, DesiredSource.PINNED)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (lambda world: Run.objects.filter(pk=world.run.pk).update(state=RunState.COMPLETED), "completed"),
        (lambda world: Project.objects.update(lending_allowed=False), "does not allow"),
        (lambda world: Replica.objects.update(state=ReplicaState.POISONED), "poisoned"),
        (lambda world: Replica.objects.update(lease_until=Now()), "the replica is"),
    ],
)
def test_loans_end_with_what_they_rest_on(change, because):
    world = lending_world()
    loan = lend(world)
    loan_advance(loan)
    assert Loan.objects.get().state == LoanState.LENT
    change(world)
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.RETURNING
    assert because in loan.return_reason


def test_acts_need_a_reason_and_a_loan():
    world = lending_world()
    with pytest.raises(Invalid):
        replica_lend(replica=world.replica, run=world.run, actor=TESTER, reason=" ")
    with pytest.raises(Conflict, match="not lent"):
        replica_return(replica=world.replica, actor=TESTER, reason="x")
    with pytest.raises(Invalid, match="windows"):
        lending_set(cluster=world.cluster, spec={}, enabled=True, actor=TESTER, reason="x")
    with pytest.raises(Invalid, match="only serving"):
        lending_set(cluster=make_cluster(world.project, slug="n"), spec=ALWAYS, enabled=True, actor=TESTER, reason="x")
    lend(world)
    with pytest.raises(Conflict, match="lent already"):
        lend(world)


# ---- policies


def loads(monkeypatch, *values):
    """What the source tells, look by look."""
    told = iter(values)

    def load_of(cluster, spec):
        value = next(told)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr("controlplane.conductor.lending.load_of", load_of)


def ago(seconds):
    LendingPolicy.objects.update(quiet_since=F("quiet_since") - seconds, load_at=F("load_at") - seconds)


def test_a_window_lends_all_but_what_is_kept_and_its_end_calls_back():
    world = lending_world(replicas=3)
    world.policy(**(ALWAYS | {"keep": 1, "sessions": 3}))
    for _ in range(4):
        policies_look()
    assert Loan.objects.filter(state=LoanState.LENT, by_hand=False, sessions=3).count() == 2
    assert "kept for users" in LendingPolicy.objects.get().note
    world.policy(
        windows=[{"days": [0], "start": "00:00", "end": "00:01"}, {"days": [0], "start": "00:02", "end": "00:03"}]
    )
    loans_advance()
    assert set(Loan.objects.values_list("state", "return_reason")) == {("returning", "no window of the policy is open")}
    policies_look()
    assert Loan.objects.count() == 2


def test_quiet_for_long_lends_one_after_another_and_a_rise_calls_all_back(monkeypatch):
    world = lending_world(replicas=3)
    world.policy(**BY_LOAD)
    loads(monkeypatch, 0.5, 0.5, 0.5, 0.5, 3.0, 0.5, 0.5, 5.1)
    policies_look()
    assert not Loan.objects.exists()
    assert "quiet for 60 s first" in LendingPolicy.objects.get().note
    ago(LONG)
    policies_look()
    assert Loan.objects.filter(state=LoanState.LENT).count() == 1
    policies_look()  # the next has to wait anew
    assert Loan.objects.count() == 1
    ago(LONG)
    policies_look()
    assert Loan.objects.count() == 2
    policies_look()  # between both bounds nothing changes
    loans_advance()
    assert Loan.objects.filter(state=LoanState.LENT).count() == 2
    policies_look()
    ago(LONG)
    policies_look()  # one is kept
    loans_advance()
    assert Loan.objects.filter(state=LoanState.LENT).count() == 2
    policies_look()
    loans_advance()
    assert {loan.return_reason for loan in Loan.objects.all()} == {"its load is 5.1, above 5"}
    assert set(Loan.objects.values_list("state", flat=True)) == {"returning"}


def test_a_load_that_is_not_known_lends_nothing_and_calls_back_after_a_while(monkeypatch):
    world = lending_world()
    world.policy(**BY_LOAD)
    away = Unavailable("Prometheus: no answer")
    loads(monkeypatch, away, 0.1, 0.1, away, away)
    policies_look()
    assert (LendingPolicy.objects.get().load, LendingPolicy.objects.get().load_error) == (None, "Prometheus: no answer")
    policies_look()
    ago(LONG)
    policies_look()
    assert Loan.objects.get().state == LoanState.LENT
    policies_look()
    loans_advance()
    assert Loan.objects.get().state == LoanState.LENT  # it was known a moment ago
    ago(LONG)
    policies_look()
    loans_advance()
    assert Loan.objects.get().return_reason == "its load is not known: Prometheus: no answer"


def test_an_edit_that_says_nothing_against_lending_calls_nothing_back(monkeypatch):
    world = lending_world(replicas=3)
    world.policy(**BY_LOAD)
    loads(monkeypatch, 0.5, 0.5)
    policies_look()
    ago(LONG)
    policies_look()
    lend(world, world.replicas[2])
    quiet_since = LendingPolicy.objects.get().quiet_since
    world.policy(**BY_LOAD | {"sessions": 9})
    loans_advance()  # before the load is read again
    assert set(Loan.objects.values_list("by_hand", "state")) == {(False, "lent"), (True, "lent")}
    assert (LendingPolicy.objects.get().load, LendingPolicy.objects.get().quiet_since) == (0.5, quiet_since)
    world.policy(**BY_LOAD | {"lend_below": 0.6})
    assert (LendingPolicy.objects.get().load, LendingPolicy.objects.get().quiet_since) == (0.5, None)


def test_a_load_that_is_asked_for_elsewhere_has_a_minute_to_be_known():
    world = lending_world()
    loan = lend(world)
    for change in ({}, {"window_s": 20.0}):  # from no source to one, and to another way of asking
        world.policy(**BY_LOAD | change)
        loans_advance()
        loan.refresh_from_db()
        assert (loan.state, LendingPolicy.objects.get().load) == (LoanState.LENT, None)
    LendingPolicy.objects.update(load_at=Now() - LONG, enabled=False)
    world.policy(**BY_LOAD | {"window_s": 20.0})  # turned on again
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.LENT
    ago(LONG)
    loans_advance()
    loan.refresh_from_db()
    assert loan.return_reason == "its load is not known: it was not read yet"


def test_what_a_person_lent_stays_past_hours_and_policies_but_not_past_a_rise(monkeypatch):
    world = lending_world()
    loan = lend(world)
    world.policy(windows=[{"days": [0], "start": "00:00", "end": "00:01"}])
    LendingPolicy.objects.update(enabled=False)
    loans_advance()
    loan.refresh_from_db()
    assert loan.state == LoanState.LENT
    world.policy(**BY_LOAD)
    loads(monkeypatch, 9.0)
    policies_look()
    loans_advance()
    loan.refresh_from_db()
    assert (loan.state, loan.return_reason) == (LoanState.RETURNING, "its load is 9, above 5")


def test_no_run_no_loan():
    world = lending_world()
    Run.objects.filter(pk=world.run.pk).update(state=RunState.PAUSED)
    world.policy(**ALWAYS)
    policies_look()
    assert LendingPolicy.objects.get().note == "no run of its model rolls out now"
