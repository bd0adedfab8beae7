"""Rolled back under load: how soon the bad version is met no more, what its users notice, and who keeps which arm."""

from __future__ import annotations

import sys
import time

import pytest
from rollback_rig import Served, served_lane
from rollback_users import Crowd

from controlplane.models import Generation, PolicyVersion
from controlplane.states import Arm, GenerationOutcome, ReleaseState, WeightSlot

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True), pytest.mark.timeout(900)]

USERS = 12
WITHIN_S = 5.0


def rolled_back(served: Served, crowd: Crowd, path: str, body: dict[str, str]) -> float:
    """Load, the rollback, and load until every user asked after what it may take; when the API had answered."""
    served.turn_until(lambda: crowd.answered_since(0) == USERS)
    served.post(path, {"reason": "complaints", **body})
    answered_s = time.time()
    served.turn_until(lambda: crowd.answered_since(answered_s + WITHIN_S) == USERS)
    return answered_s


def check_answers(served: Served, crowd: Crowd, bad: PolicyVersion, answered_s: float, what: str) -> None:
    """Nothing is lost, all is recorded as it was, and the bad version was met no more in time."""
    rows = {row.id: row for row in Generation.objects.filter(lane=served.world.lane).select_related("version")}
    told = {answer.generation: answer for answer in crowd.answers}
    assert len(told) == len(crowd.answers)
    assert {answer.user for answer in crowd.answers if answer.version == str(bad)} == {
        f"user-{number}" for number in range(USERS)
    }
    whole = {key for key, row in rows.items() if row.outcome == GenerationOutcome.ANSWERED}
    assert whole == set(told)
    assert all(str(rows[key].version) == answer.version for key, answer in told.items())
    late = {answer.version for answer in crowd.answers if answer.begun_s > answered_s + WITHIN_S}
    assert late == {str(served.first)}
    last_s = served.last_admitted_s(bad) - answered_s
    sys.stderr.write(
        f"{what}: last new request on the bad version {last_s:+.2f} s after the rollback's answer; "
        f"{len(told)} answers, turned away on the way: {dict(crowd.turned_away)}\n"
    )
    assert last_s <= WITHIN_S


def test_with_two_slots_no_user_notices_more_than_another_version(tmp_path, settings, test_database_url):
    state = ReleaseState.PROMOTED
    with served_lane(tmp_path, settings, test_database_url, slots=2, doors=2, state=state) as served:
        served.hold({WeightSlot.DEFAULT: served.bad, WeightSlot.CANDIDATE: served.first})
        with served.crowd(USERS) as crowd:
            answered_s = rolled_back(served, crowd, "lanes/assistant/rollback", {"version": str(served.first.pk)})
        check_answers(served, crowd, served.bad, answered_s, "two slots")
        assert not crowd.turned_away
        assert Generation.objects.exclude(outcome=GenerationOutcome.ANSWERED).count() == 0


def test_with_one_slot_users_come_again_while_the_replica_loads(tmp_path, settings, test_database_url):
    state = ReleaseState.PROMOTED
    with served_lane(tmp_path, settings, test_database_url, slots=1, doors=2, state=state) as served:
        served.hold({WeightSlot.DEFAULT: served.bad})
        with served.crowd(USERS) as crowd:
            answered_s = rolled_back(served, crowd, "lanes/assistant/rollback", {"version": str(served.first.pk)})
        check_answers(served, crowd, served.bad, answered_s, "one slot")
        assert set(crowd.turned_away) <= {"503 no_replica"}
        slot = served.world.replica.slots.get()
        assert (slot.current_version, slot.current_root) == (served.first, served.first.root)


def test_users_keep_their_arm_through_restarts_until_the_canary_is_rolled_back(tmp_path, settings, test_database_url):
    state = ReleaseState.CANARY
    with served_lane(tmp_path, settings, test_database_url, slots=2, doors=2, state=state) as served:
        served.hold({WeightSlot.DEFAULT: served.first, WeightSlot.CANDIDATE: served.bad})
        served.release.share = 0.5
        served.release.save(update_fields=["share"])
        before = served.doors().ask_each(2 * USERS)
        assert set(before.values()) == {str(served.first), str(served.bad)}
        with served.crowd(USERS) as crowd:
            for kill in (True, False):
                served.turn_for(1.0)
                for web in served.webs:
                    web.end(kill=kill)
                served.start_webs()
            served.turn_for(1.0)
        met = {(answer.user, answer.version) for answer in crowd.answers}
        assert met == {(user, before[user]) for user, _ in met}
        assert len(met) == USERS
        assert crowd.turned_away, "users met the restarts"
        assert served.doors().ask_each(2 * USERS) == before
        rows = Generation.objects.filter(release=served.release)
        assert set(rows.values_list("version", "arm")) == {
            (served.first.pk, Arm.PROMOTED),
            (served.bad.pk, Arm.CANARY),
        }
        with served.crowd(USERS) as crowd:
            answered_s = rolled_back(served, crowd, f"releases/{served.release.pk}/rollback", {})
        assert not crowd.turned_away
        last_s = served.last_admitted_s(served.bad) - answered_s
        sys.stderr.write(f"canary: last new request on the bad version {last_s:+.2f} s after the rollback's answer\n")
        assert last_s <= WITHIN_S
        assert set(served.doors().ask_each(2 * USERS).values()) == {str(served.first)}
