"""Worlds that do not start: what was taken for them is given back, however often that happens."""

import os
from pathlib import Path

import pytest

from rl_core.errors import WorldError
from rl_core.sandbox.launch import Launcher
from rl_core.sandbox.protocol import RunLimits
from rl_core.sandbox.runtime import Runtime


class Group:
    """A group without a place: nothing is ever started in it."""

    removed = 0

    def doors(self):
        return []

    def remove(self):
        type(self).removed += 1
        return True


class Cgroups:
    """Groups that can or cannot be made."""

    def __init__(self, *, full):
        self.full = full

    def create(self, name, limits):
        if self.full:
            raise OSError("no space left on device")
        return Group()


def launcher(*, full):
    nothing = Runtime(bwrap=Path("/nowhere"), bwrap_libs=None, binds=(), hidden=(), links=())
    return Launcher(runtime=nothing, cgroups=Cgroups(full=full), first_uid=None, landlock=False)


async def test_users_are_given_back_when_no_group_can_be_made():
    one = launcher(full=True)
    for _ in range(3):
        with pytest.raises(OSError, match="no space"):
            one.start(RunLimits())
    assert sorted(one.identities) == list(range(1024))


async def test_nothing_is_left_of_a_world_whose_starter_is_gone():
    one = launcher(full=False)
    starter = one.starter()
    starter.requests.close()  # it ends with that
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        with pytest.raises(WorldError, match="starts sandboxes is gone"):
            one.start(RunLimits())
        assert Group.removed == number + 1
    assert len(os.listdir("/proc/self/fd")) == before
    assert sorted(one.identities) == list(range(1024))
    starter.process.wait(10)
