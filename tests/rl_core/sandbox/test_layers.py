"""Controls: with its layer off an attack gets through, so the layer is what holds it. And the unprivileged user."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.errors import SandboxRefused
from rl_core.sandbox.seccomp import seccomp_program
from tests.rl_core.sandbox.attacks import CONTAINED, HARMLESS, attack
from tests.rl_core.sandbox_process import REFUSED, ROOT

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks name x86-64 system calls")

MEMFD = "import os\nfd = os.memfd_create('m')\nfor _ in range(128): os.write(fd, b'x' * (1 << 20))\nprint('ESCAPED')"
FORKS = """
import os, time
n = 0
try:
    for _ in range(18):
        os.fork() or time.sleep(3) or os._exit(0)
        n += 1
except OSError:
    pass
print('ESCAPED' if n == 18 else 'held')
"""
CONTROLS = [
    ("seccomp", attack(HARMLESS["netlink socket"])),
    ("seccomp", attack(CONTAINED["vsock"])),
    ("seccomp", attack(CONTAINED["keyring"])),
    ("seccomp", attack("attempt(lambda: syscall(101, 0, 0, 0, 0))")),
    ("seccomp", attack(HARMLESS["handle of a file"])),
    ("cgroup", MEMFD),
    ("cgroup", FORKS),
]


def run_without(layer, code):
    command = [sys.executable, str(Path(__file__).parent / "without_layer.py"), layer, code]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=90)
    if "SandboxRefused" in done.stderr:
        pytest.skip(f"sandboxd refuses: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.parametrize(("layer", "code"), CONTROLS)
def test_without_its_layer_the_attack_gets_through(layer, code):
    assert "ESCAPED" in run_without(layer, code)["stdout"]
    assert "ESCAPED" not in run_without("none", code)["stdout"]


@pytest.mark.full
def test_without_landlock_the_supervisor_can_be_killed():
    code = attack(CONTAINED["kill the supervisor"])
    held = run_without("none", code)
    if "held" not in held["stdout"]:
        pytest.skip("this kernel's Landlock does not scope signals (ABI 6)")
    assert held["outcome"] == "ok"
    assert run_without("landlock", code)["outcome"] == "killed"


def test_the_filter_is_for_known_machines_alone():
    assert len(seccomp_program("x86_64")) % 8 == len(seccomp_program("aarch64")) % 8 == 0
    with pytest.raises(SandboxRefused, match="architecture m68k"):
        seccomp_program("m68k")


def delegated_groups(uid: int) -> list[Path]:
    """A v1 cgroup of each kind that a user may make groups in."""
    groups = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        if kind in ("memory", "pids", "cpu"):
            groups.append(Path("/sys/fs/cgroup") / kind / path.lstrip("/") / f"slipwaytest-{os.getpid()}")
    for group in groups:
        group.mkdir()
        for path in (group, *group.iterdir()):
            os.chown(path, uid, uid)
    return groups


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can delegate a cgroup to another user")
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir(), reason="delegates cgroup v1; here is v2 alone")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv: apt-get install util-linux")
def test_an_unprivileged_user_with_a_delegated_cgroup_can_run_it():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python, uid = Path(f"/usr/bin/python{version}"), 54_321
    if not python.exists():
        pytest.skip(f"needs a Python that every user can read: apt-get install python{version}")
    packages = Path(sys.prefix) / f"lib/python{version}/site-packages"
    groups = delegated_groups(uid)
    try:
        done = subprocess.run(
            [
                "setpriv",
                f"--reuid={uid}",
                f"--regid={uid}",
                "--clear-groups",
                str(python),
                "-m",
                "rl_core.sandbox",
                "--check",
            ],
            cwd="/",
            env={"PYTHONPATH": f"{ROOT}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=lambda: [(group / "cgroup.procs").write_text(str(os.getpid())) for group in groups],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        for group in groups:
            group.rmdir()
    if "Permission denied" in done.stderr or "No module named" in done.stderr:
        pytest.skip("this checkout lies in a folder that other users cannot read")
    assert done.returncode != REFUSED, done.stderr
    assert "absent   own_user" in done.stdout
    assert "MISSING" not in done.stdout
