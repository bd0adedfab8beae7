"""cgroup v2 and the refusals, on a tree of plain files: this machine may have only one of the two versions."""

from pathlib import Path

import pytest

from rl_core.errors import SandboxRefused
from rl_core.sandbox.cgroups import OVERHEAD_PIDS, CgroupsV2
from rl_core.sandbox.hierarchies import find_cgroups
from rl_core.sandbox.protocol import RunLimits


def a_proc(tmp_path: Path, *, controllers: str = "cpu io memory pids", mount: bool = True) -> Path:
    """A /proc/self and a v2 hierarchy in which it lies at /user/own."""
    tree = tmp_path / "cgroup"
    own = tree / "user/own"
    own.mkdir(parents=True)
    (tree / "cgroup.controllers").write_text(controllers)
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/user/own\n")
    line = f"30 20 0:26 / {tree} rw,nosuid - cgroup2 cgroup2 rw\n" if mount else ""
    (proc / "mountinfo").write_text("20 1 8:1 / / rw - ext4 /dev/sda rw\n" + line)
    return proc


def test_version_2_delegates_and_limits(tmp_path, monkeypatch):
    proc = a_proc(tmp_path)
    monkeypatch.setattr("rl_core.sandbox.cgroups._remove", lambda folder: True)  # rmdir of files is the kernel's
    cgroups = find_cgroups(proc=proc, root=False)
    assert isinstance(cgroups, CgroupsV2)
    own = tmp_path / "cgroup/user/own"
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    cgroups.create("1-2", RunLimits(pids=10))
    folder = own / "slipway-1-2"
    assert (folder / "memory.max").read_text() == str(RunLimits().memory_bytes)
    assert (folder / "pids.max").read_text() == str(10 + OVERHEAD_PIDS)
    assert (folder / "cpu.max").read_text() == "100000 100000"


def test_version_2_counts_and_kills(tmp_path):
    (tmp_path / "slipway-1").mkdir()
    group = CgroupsV2(tmp_path).create("2", RunLimits())
    folder = tmp_path / "slipway-2"
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (folder / "cgroup.procs").write_text("")
    (folder / "cgroup.kill").write_text("")
    assert group.oom_kills() == 2
    assert group.kill()
    assert (folder / "cgroup.kill").read_text() == "1"
    assert (folder / "pids.max").read_text() == "0"
    assert group.doors() == [str(folder / "cgroup.procs")]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"controllers": "hugetlb"}, "v2: no controllers cpu, memory, pids"), ({"mount": False}, "not mounted")],
)
def test_no_cgroup_is_refused_with_the_remedy(tmp_path, change, message):
    with pytest.raises(SandboxRefused, match=f"{message}.*Delegate=yes"):
        find_cgroups(proc=a_proc(tmp_path, **change), root=False)
