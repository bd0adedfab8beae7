"""Controls: with its layer off an attack gets through, so the layer is what holds it."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.errors import SandboxRefused
from rl_core.sandbox import launch
from rl_core.sandbox.cgroups import CONTROLLERS, CgroupsV2
from rl_core.sandbox.layers import landlock_abi
from rl_core.sandbox.protocol import RunLimits
from rl_core.sandbox.runtime import Runtime
from rl_core.sandbox.seccomp import seccomp_program
from tests.rl_core.sandbox.controls import CONTROLS, NAMESPACES, REFUSED, RLIMITS
from tests.rl_core.sandbox_process import ROOT

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks name x86-64 system calls")
LANDLOCK_ABI = {"landlock, a file": 1, "landlock, a service": 4, "landlock, a signal": 6}


def without_layer(what):
    """What `without_layer.py` has seen."""
    command = [sys.executable, str(Path(__file__).parent / "without_layer.py"), what]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(sandboxd):
    """What each attack printed in the whole sandbox, without the other layers that hold it, and without its own."""
    return without_layer("controls")


@pytest.mark.full
def test_without_a_layer_or_as_root_inside_sandboxd_refuses(sandboxd):
    reasons = without_layer("refusals")
    assert reasons.pop("nothing") == ""
    assert set(reasons) == set(REFUSED)
    assert "the sandbox's probe ended with killed" in reasons.pop("processes")  # it has killed its own sandbox
    assert [name for name, reason in reasons.items() if "layers of the sandbox are missing" not in reason] == []
    assert "of user 0 inside" in reasons["root"]


@X86
@pytest.mark.full
@pytest.mark.parametrize("name", CONTROLS)
def test_an_attack_is_held_by_its_layer_and_gets_through_without(seen, name):
    if CONTROLS[name].needs_root and name not in seen:
        pytest.skip("only root has this layer to take away")
    worlds = seen[name]
    if landlock_abi() < LANDLOCK_ABI.get(name, 0):
        pytest.skip(f"needs a kernel with Landlock of ABI {LANDLOCK_ABI[name]}")
    assert {world: "ESCAPED" in printed for world, printed in worlds.items()} == {
        "whole": False,
        "base": False,
        "without": True,
    }, worlds


def test_every_layer_has_a_control():
    controlled = {control.layer for control in CONTROLS.values()}
    assert {f"{kind} namespace" for kind in NAMESPACES} <= controlled
    assert {f"rlimit {name}" for name in RLIMITS} <= controlled
    assert {f"cgroup {name}" for name in CONTROLLERS} <= controlled
    assert {
        "own user",
        "no new privileges",
        "seccomp",
        "landlock",
        "empty environment",
        "closed descriptors",
    } <= controlled


def test_the_launcher_uses_no_namespace_or_limit_that_has_no_control(tmp_path):
    runtime = Runtime(bwrap=Path("bwrap"), bwrap_libs=None, binds=(), hidden=(), links=())
    launcher = launch.Launcher(runtime, CgroupsV2(tmp_path), first_uid=1, landlock=True)
    flags = {word.removeprefix("--unshare-") for word in launcher.argv(RunLimits()) if "--unshare-" in word}
    assert flags | {"mount"} == set(NAMESPACES)  # bubblewrap always makes one of mounts
    limited = {kind for kind, _, _ in launch.rlimits(RunLimits(), own_user=True)}
    assert limited == {getattr(launch.resource, f"RLIMIT_{name}") for name in RLIMITS}


def test_the_filter_is_for_known_machines_alone():
    assert len(seccomp_program("x86_64")) % 8 == len(seccomp_program("aarch64")) % 8 == 0
    with pytest.raises(SandboxRefused, match="architecture m68k"):
        seccomp_program("m68k")
