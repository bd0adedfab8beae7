"""What an update's gap counts: time between decode steps, from when it is prepared until soon after the flip."""

import pytest

from rl_core.engines.gauges import Gauges


def test_the_gap_of_an_update_is_of_steps_that_followed_each_other(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    gauges = Gauges()

    def step(after: float, *, more: bool = True) -> float:
        now[0] += after
        gauges.stepped(after, more=more)
        return gauges.update_gap_s

    step(5.0)
    assert step(9.0) == 0.0  # nobody updates
    gauges.update_begins()
    assert step(0.25) == 0.25  # the step that the update found under way
    assert step(1.0, more=False) == 1.0
    assert step(7.0) == 1.0  # nothing ran in between
    gauges.swapped(0.001)
    assert step(2.0) == 2.0
    assert step(0.5) == 2.0
    assert step(4.0) == 2.0  # long after the swap
    gauges.update_begins()
    assert gauges.snapshot()["update_gap_s"] == 0.0
    assert (gauges.swaps_total, gauges.last_pause_s) == (1, 0.001)
    assert gauges.snapshot()["decode_step_median_s"] == pytest.approx(3.0)
