"""Where turns go: a fitting version first, then home, then the least loaded."""

import uuid

import pytest

from controlplane.selectors.rollout_plans import Place, RolloutPlan
from rl_core.environments.harness import Limits, SeedKey
from rl_core.environments.tasks import Task
from rl_core.errors import EngineBusy, EngineUnreachable, VersionUnavailable
from rl_core.types import ClusterRole, SamplingParams, Split, VersionRef
from workers.replicas import Need, ReplicaPool

PROJECT, LINEAGE = uuid.uuid4(), uuid.uuid4()


def version(number: int) -> VersionRef:
    return VersionRef(str(LINEAGE), 0, number)


def place(cluster="east", *, number=3, role=ClusterRole.ROLLOUT, capacity=8, project=PROJECT) -> Place:
    return Place(uuid.uuid4(), cluster, project, role, "http://x", "default", version(number), capacity)


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
