"""The planner's arithmetic, by values computed by hand."""

import math

import pytest

from rl_core.capacity import THEORETICAL_SHARE, Demand, Limit, Measured, plan
from rl_core.errors import SpecError


def west(**changes) -> Measured:
    """Two replicas of 4 devices that sample 300 tokens a second and are idle for a quarter: 400 when never idle."""
    values = {"name": "west", "replicas": 2, "devices": 4, "tokens_s": 300.0, "idle_share": 0.25, "device": "H200"}
    return Measured(**(values | changes))


def demand(**changes) -> Demand:
    """9000 tokens and 3 tasks a step, of 10 s; a tenth is sampled in vain: 1000 tokens a second keep it busy."""
    values = {"step_tokens": 9000.0, "step_tasks": 3.0, "train_s": 10.0, "useful_share": 0.9, "trainer_devices": 8}
    return Demand(**(values | changes))


def test_a_trainer_that_waits():
    found = plan(demand(), [west()])
    assert found.limit is Limit.ROLLOUTS
    assert found.needed_tokens_s == pytest.approx(1000)
    assert found.capacity_tokens_s == pytest.approx(400)
    assert found.missing_tokens_s == pytest.approx(600)
    assert found.step_s == pytest.approx(10_000 / 400)
    assert found.trainer_idle_share == pytest.approx(1 - 10 / 25)
    assert found.rollouts_idle_share == 0
    assert found.rollout_device_s_each == pytest.approx(8 * 25 / (8 * 10))


def test_a_further_replica_of_one_that_waits():
    (more,) = plan(demand(), [west()]).further
    assert (more.cluster, more.device) == ("west", "H200")
    assert more.tokens_s == pytest.approx(200)
    assert more.step_s == pytest.approx(10_000 / 600)
    assert more.steps_hour_more == pytest.approx(3600 * 600 / 10_000 - 3600 / 25)
    assert more.trainer_idle_share == pytest.approx(1 - 10 * 600 / 10_000)
    assert more.replicas_to_balance == 3  # 600 missing at 200 each


def test_rollouts_that_wait():
    found = plan(demand(), [west(tokens_s=1500.0)])
    assert found.limit is Limit.TRAINER
    assert found.capacity_tokens_s == pytest.approx(2000)
    assert (found.missing_tokens_s, found.step_s, found.trainer_idle_share) == (0, 10.0, 0.0)
    assert found.rollouts_idle_share == pytest.approx(0.5)
    assert found.rollout_device_s_each == pytest.approx(8 * 10 * 0.5 / 80)
    (more,) = found.further
    assert (more.step_s, more.steps_hour_more, more.replicas_to_balance) == (10.0, 0.0, 0)


def test_clusters_add_up_and_each_has_its_own_replica():
    found = plan(demand(), [west(), west(name="east", replicas=1, devices=1, tokens_s=100.0, idle_share=0.5)])
    assert found.capacity_tokens_s == pytest.approx(400 + 200)
    assert [more.cluster for more in found.further] == ["west", "east"]
    assert [more.tokens_s for more in found.further] == [pytest.approx(200), pytest.approx(200)]


def test_what_a_task_costs():
    """West's 8 devices at $3 and the trainer's 8 at $6 cost $72 an hour: $0.50 for a step of 25 s, of 3 tasks."""
    found = plan(demand(trainer_dollars_device_hour=6.0), [west(dollars_device_hour=3.0)])
    assert found.task.sampled_tokens == pytest.approx(10_000 / 3)
    assert found.task.rollout_device_s == pytest.approx(8 * 25 / 3)
    assert found.task.trainer_device_s == pytest.approx(8 * 10 / 3)
    assert found.task.dollars == pytest.approx(0.5 / 3)
    assert found.task.cluster_dollars == (pytest.approx(24 * 25 / 3600 / 3),)
    assert found.task.trainer_dollars == pytest.approx(48 * 25 / 3600 / 3)
    assert found.further[0].dollars_hour == pytest.approx(12)


def test_what_a_million_tokens_cost():
    """$24 an hour for 400 tokens a second: 1.44 million an hour, $16.67 each."""
    assert west(dollars_device_hour=3.0).dollars_million_tokens == pytest.approx(24 / 1.44)
    assert west().dollars_million_tokens is None
    assert west(dollars_device_hour=3.0, tokens_s=0.0).dollars_million_tokens is None


def test_a_published_run_by_hand():
    """A trainer of 64 devices, 300 s a step of 512 tasks with 16 attempts of 12,000 tokens, a fifth in vain.

    98.3 million trained tokens are 122.9 million sampled, 409,600 a second. 30 replicas of 8 devices that sample
    10,000 a second each, a tenth of the time idle, could sample 333,333: a step takes 368.64 s and the trainer waits
    for 18.6 % of it. Seven more replicas of 11,111 keep it busy. At $4 a device the 304 devices cost $1216 an hour,
    $124.52 a step, 24 cents a task.
    """
    step = demand(
        step_tokens=512 * 16 * 12_000.0,
        step_tasks=512.0,
        train_s=300.0,
        useful_share=0.8,
        trainer_devices=64,
        trainer_dollars_device_hour=4.0,
    )
    far = west(replicas=30, devices=8, tokens_s=300_000.0, idle_share=0.1, dollars_device_hour=4.0)
    found = plan(step, [far])
    assert found.needed_tokens_s == pytest.approx(409_600)
    assert found.capacity_tokens_s == pytest.approx(333_333, rel=1e-5)
    assert found.step_s == pytest.approx(368.64)
    assert found.trainer_idle_share == pytest.approx(0.18620, rel=1e-4)
    assert found.further[0].replicas_to_balance == 7
    assert found.task.dollars == pytest.approx(0.24320, rel=1e-4)
    assert found.task.sampled_tokens == pytest.approx(240_000)
    assert found.rollout_device_s_each == pytest.approx(240 * 368.64 / (64 * 300))
    assert found.theoretical_device_s_each == pytest.approx(2 / 6 / 0.8)


@pytest.mark.parametrize(("trainer", "rollouts"), [(None, 3.0), (6.0, None)])
def test_a_price_that_is_missing_makes_no_sum(trainer, rollouts):
    found = plan(demand(trainer_dollars_device_hour=trainer), [west(dollars_device_hour=rollouts)])
    assert found.task.dollars is None


def test_theory_is_met_at_equal_utilisation():
    """One device trains at F FLOPs a second for 6·N a token; others sample at the same F for 2·N each."""
    flops, weights = 6e12, 1e9
    per_device = flops / (2 * weights)
    train_s = 9000 * 6 * weights / flops
    found = plan(
        demand(useful_share=1.0, train_s=train_s, trainer_devices=1),
        [west(replicas=1, devices=1, tokens_s=per_device, idle_share=0.0)],
    )
    assert found.rollout_device_s_each == pytest.approx(THEORETICAL_SHARE)
    assert found.theoretical_device_s_each == THEORETICAL_SHARE


def test_a_cluster_that_was_always_idle_has_no_replica_to_count_on():
    found = plan(demand(), [west(), west(name="spare", tokens_s=0.0, idle_share=1.0)])
    assert [more.cluster for more in found.further] == ["west"]


def test_nothing_sampled_is_no_plan():
    assert demand().step_s(0.0) == math.inf
    with pytest.raises(SpecError, match="no cluster sampled"):
        plan(demand(), [west(tokens_s=0.0)])


@pytest.mark.parametrize(
    "changes", [{"useful_share": 0.0}, {"useful_share": 1.5}, {"train_s": 0.0}, {"step_tokens": 0.0}]
)
def test_a_step_takes_something(changes):
    with pytest.raises(SpecError, match="a step takes"):
        demand(**changes)


@pytest.mark.parametrize("changes", [{"replicas": 0}, {"devices": 0}, {"idle_share": 1.2}, {"tokens_s": -1.0}])
def test_a_cluster_is_possible(changes):
    with pytest.raises(SpecError, match="west"):
        west(**changes)
