"""Worlds of the reference server: none of them holds up or breaks another one's calls."""

import threading

import pytest

from rl_core.environments.remote.worlds import Worlds
from tests.rl_core.environments.remote.customers import Counter

ADD = {"tool": "add", "arguments": {"n": 1}}


def opened(worlds, key):
    return worlds.open({"key": key, "task": {"id": key}})["handle"]


def test_a_world_that_is_slow_to_open_holds_up_no_other_and_opens_once():
    gate, opens = threading.Event(), []

    class Slow(Counter):
        def open(self, task):
            opens.append(task["id"])
            if task["id"] == "slow":
                gate.wait(10)
            return super().open(task)

    worlds = Worlds(Slow())
    quick = opened(worlds, "quick")
    handles = []
    askers = [threading.Thread(target=lambda: handles.append(opened(worlds, "slow"))) for _ in range(2)]
    for asker in askers:
        asker.start()
    told = []
    calling = threading.Thread(target=lambda: told.append(worlds.call({"handle": quick, "number": 0, **ADD})))
    calling.start()
    calling.join(5)
    assert told == [{"text": "1", "ok": True, "solved": False}]
    gate.set()
    for asker in askers:
        asker.join(10)
    assert len(set(handles)) == 1 == opens.count("slow")
    assert len(handles) == 2


def test_a_world_that_does_not_open_can_be_opened_again():
    class Failing(Counter):
        fails = True

        def open(self, task):
            if self.fails:
                raise RuntimeError("no disk")
            return super().open(task)

    world = Failing()
    worlds = Worlds(world, max_open=1)
    with pytest.raises(RuntimeError, match="no disk"):
        opened(worlds, "a")
    world.fails = False
    assert worlds.call({"handle": opened(worlds, "a"), "number": 0, **ADD})["text"] == "1"


def test_a_world_that_does_not_close_is_nobody_elses_fault():
    class Stuck(Counter):
        def close(self, state):
            raise RuntimeError("cannot close")

    now = [0.0]
    worlds = Worlds(Stuck(), lease_s=10.0, clock=lambda: now[0])
    opened(worlds, "old")
    now[0] = 5.0
    young = opened(worlds, "young")
    now[0] = 12.0  # the old one's lease is over
    assert worlds.call({"handle": young, "number": 0, **ADD})["text"] == "1"
