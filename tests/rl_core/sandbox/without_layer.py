"""Runs one attack in a sandbox with one layer taken off, and prints the outcome as JSON. For controls alone.

A script of its own, because as root a launcher takes its process into a mount namespace of its own.
"""

import asyncio
import dataclasses
import json
import struct
import sys

from rl_core.sandbox.cgroups import Cgroups
from rl_core.sandbox.layers import build_launcher
from rl_core.sandbox.protocol import MIB, RunLimits, RunRequest
from rl_core.sandbox.reaper import Reaper

ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)


class LooseCgroups:
    """Groups whose limits are those of `loose`, whatever a run asks for: bounded, but not by the run's own limits."""

    def __init__(self, inner: Cgroups, loose: RunLimits) -> None:
        self.inner, self.loose, self.version = inner, loose, inner.version

    def create(self, name, limits):
        return self.inner.create(name, self.loose)


async def main(layer: str, code: str) -> None:
    launcher, _ = await build_launcher()
    loose = LooseCgroups(launcher.cgroups, RunLimits(pids=60, memory_bytes=400 * MIB))
    changes = {
        "none": {},
        "seccomp": {"program": ALLOW_ALL},
        "landlock": {"landlock": False},
        "cgroup": {"cgroups": loose},
    }
    launcher = dataclasses.replace(launcher, **changes[layer])
    limits = RunLimits(wall_s=20.0, pids=16, memory_bytes=64 * MIB, disk_bytes=512 * MIB, cpu_s=10)
    argv = ["python3", "-I", "-S", "-c", code]
    result = await launcher.run(RunRequest(argv=argv, limits=limits), slot=40)
    sys.stdout.write(json.dumps({"outcome": result.outcome, "stdout": result.stdout.decode()}))


Reaper.adopt_orphans()
asyncio.run(main(sys.argv[1], sys.argv[2]))
