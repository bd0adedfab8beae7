"""Where turns go: a fitting version first, then home, then the least loaded."""

import asyncio
import uuid

import pytest

from controlplane.selectors.rollout_plans import Need, Place, RolloutPlan
from rl_core.environments.session import SeedKey
from rl_core.environments.tasks import Task
from rl_core.errors import EngineBusy, EngineUnreachable, VersionUnavailable
from rl_core.session_specs import Limits
from rl_core.types import ClusterRole, SamplingParams, Split, VersionRef
from workers.replicas import ReplicaPool

PROJECT, LINEAGE, RUN = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()


def version(number: int) -> VersionRef:
    return VersionRef(str(LINEAGE), 0, number)


def place(cluster="east", *, number=3, role=ClusterRole.ROLLOUT, capacity=8, project=PROJECT, lent_to=None) -> Place:
    return Place(uuid.uuid4(), cluster, project, role, "http://x", "default", version(number), capacity, lent_to)


def need(*, minimum=None, exact=None, clusters=()) -> Need:
    plan = RolloutPlan(
        group_id=uuid.uuid4(),
        lineage_id=LINEAGE,
        environment="word-problems",
        model_folder="",
        task=Task(id="t", split=Split.TRAIN, input={"q": 1}),
        sampling=SamplingParams(),
        limits=Limits(),
        seed=SeedKey(run_seed=0, group="0", attempt=0),
        exact_version=exact,
        max_staleness=1,
        cluster_slugs=frozenset(clusters),
        project_id=PROJECT,
        run_id=RUN,
        with_routes=False,
        rollouts=(),
    )
    return Need(plan, minimum)


@pytest.mark.parametrize(
    ("where", "wanted", "allowed"),
    [
        (place(number=3), need(minimum=version(3)), True),
        (place(number=2), need(minimum=version(3)), False),
        (place(number=4), need(exact=version(3)), False),
        (place("west"), need(clusters=["east"]), False),
        (place(role=ClusterRole.SERVING), need(minimum=version(1)), False),  # training never meets user traffic
        (place(role=ClusterRole.SERVING), need(exact=version(3)), True),  # a gate evaluates where the candidate is
        (place(project=uuid.uuid4()), need(minimum=version(1)), False),
        (place(role=ClusterRole.SERVING, lent_to=RUN), need(minimum=version(1), clusters=["east"]), True),
        (place(role=ClusterRole.SERVING, lent_to=uuid.uuid4()), need(minimum=version(1)), False),
        (place(role=ClusterRole.SERVING, lent_to=uuid.uuid4()), need(exact=version(3)), False),
    ],
)
def test_which_places_may_answer(where, wanted, allowed):
    assert wanted.allows(where) is allowed


def test_groups_that_settle_before_any_turn_spread_evenly():
    pool = ReplicaPool()
    east, west = place("east"), place("west")
    pool.update([east, west])
    homes = [pool.settle(need(), 4).replica_id for _ in range(4)]
    assert homes.count(east.replica_id) == homes.count(west.replica_id) == 2


def test_a_home_that_is_left_makes_room_once():
    pool = ReplicaPool()
    small, large = place("small", capacity=4), place("large", capacity=400)
    pool.update([small])
    home = pool.settle(need(), 4)
    pool.update([small, large])
    assert pool.settle(need(), 4).replica_id == large.replica_id
    home.leave()
    home.leave()
    assert pool.settle(need(), 1).replica_id == small.replica_id


def test_without_a_fitting_version_nobody_is_asked():
    pool = ReplicaPool()
    pool.update([place(number=1)])
    with pytest.raises(VersionUnavailable):
        pool._choose(need(minimum=version(2)), None)
    assert pool.settle(need(minimum=version(2)), 4).replica_id is None


class Broken:
    """An engine that does not answer."""

    async def generate(self, *arguments, **options):
        raise EngineUnreachable("gone")


async def test_a_replica_that_does_not_answer_is_avoided_for_a_while():
    pool = ReplicaPool(client_of=lambda where: Broken())
    east, west = place("east"), place("west")
    pool.update([east, west])
    turn = {"prompt_token_ids": [1], "sampling": SamplingParams(), "session": "s"}
    with pytest.raises(EngineUnreachable):
        await pool.generate(need(), prefer=east.replica_id, **turn)
    assert pool._choose(need(), east.replica_id).place == west
    with pytest.raises(EngineUnreachable):
        await pool.generate(need(), prefer=west.replica_id, **turn)
    with pytest.raises(EngineBusy):
        pool._choose(need(), None)


class Holding:
    """An engine that answers when it is told to, and says of whom it was asked and for what."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.asked: list[dict[str, object]] = []

    async def generate(self, *arguments, **options):
        self.asked.append(options)
        await self.release.wait()
        return "generated"


def turns(pool: ReplicaPool, wanted: Need, count: int, *, prefer=None) -> list[asyncio.Task]:
    turn = {"prompt_token_ids": [1], "sampling": SamplingParams(), "session": "s", "prefer": prefer}
    return [asyncio.create_task(pool.generate(wanted, **turn)) for _ in range(count)]


async def test_turns_spread_by_free_capacity_and_are_turned_away_past_it():
    engine = Holding()
    pool = ReplicaPool(client_of=lambda where: engine)
    small, large = place("east", capacity=3), place("west", capacity=9)
    pool.update([small, large])
    under_way = turns(pool, need(), 8)
    await asyncio.sleep(0)
    assert {key[0]: seat.in_flight for key, seat in pool._seats.items()} == {small.replica_id: 2, large.replica_id: 6}
    under_way += turns(pool, need(), 4)
    await asyncio.sleep(0)
    with pytest.raises(EngineBusy):
        await turns(pool, need(), 1)[0]
    engine.release.set()
    played = [replica for _, replica in await asyncio.gather(*under_way)]
    assert (played.count(small.replica_id), played.count(large.replica_id)) == (3, 9)
    assert all(seat.in_flight == 0 for seat in pool._seats.values())


async def test_a_session_stays_where_its_beginning_is_cached_until_that_is_full_or_gone():
    engine = Holding()
    pool = ReplicaPool(client_of=lambda where: engine)
    home, other = place("east", capacity=2), place("west", capacity=8)
    pool.update([home, other])
    turns(pool, need(), 1)
    await asyncio.sleep(0)
    stay = turns(pool, need(), 2, prefer=home.replica_id)
    await asyncio.sleep(0)
    seats = {key[0]: seat.in_flight for key, seat in pool._seats.items()}
    assert seats[home.replica_id] == 2
    away = turns(pool, need(), 1, prefer=home.replica_id)
    await asyncio.sleep(0)
    assert {key[0]: seat.in_flight for key, seat in pool._seats.items()} == {
        home.replica_id: 2,
        other.replica_id: sum(seats.values()) - 2 + 1,
    }
    pool.update([other])  # drained, lapsed, poisoned or returned: places() leaves it out
    assert pool._choose(need(), home.replica_id).place == other
    engine.release.set()
    await asyncio.gather(*stay, *away)


def test_of_equally_free_places_the_newest_version_is_asked():
    pool = ReplicaPool()
    older, newer = place("east", number=3), place("west", number=4)
    pool.update([older, newer])
    assert {pool._choose(need(minimum=version(3)), None).place.cluster for _ in range(20)} == {"west"}
    pool._seats[newer.replica_id, "default"].in_flight = 1
    assert pool._choose(need(minimum=version(3)), None).place == older


async def test_a_turn_says_which_versions_may_answer_and_that_users_go_first():
    engine = Holding()
    engine.release.set()
    pool = ReplicaPool(client_of=lambda where: engine)
    pool.update([place(role=ClusterRole.SERVING, lent_to=RUN)])
    await asyncio.gather(*turns(pool, need(minimum=version(2)), 1))
    pool.update([place(role=ClusterRole.ROLLOUT)])
    await asyncio.gather(*turns(pool, need(exact=version(3)), 1))
    asked = [(one["min_version"], one["exact_version"], one["background"]) for one in engine.asked]
    assert asked == [(version(2), None, True), (None, version(3), False)]
