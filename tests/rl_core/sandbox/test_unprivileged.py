"""The same sandbox for a user who is not root: refused with the remedy where a limit is hidden, else it runs."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.rl_core.sandbox_process import REFUSED, ROOT, sandboxd_command

UID = 54_321
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SYSTEM_PYTHON = Path(f"/usr/bin/python{VERSION}")
CGROUPS_REMEDY = "systemd-run --user --scope -p Delegate=yes"
USERS_REMEDY = "sysctl -w user.max_user_namespaces"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can show what an unprivileged user sees"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv: apt-get install util-linux"),
]
DELEGATES = pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory").is_dir() or not SYSTEM_PYTHON.exists(),
    reason=f"delegates cgroup v1, and needs a Python that every user can read: apt-get install python{VERSION}",
)


def as_nobody(*command: str) -> list[str]:
    """A command as a user who may read this checkout wherever it lies, and has no power over cgroups."""
    reading = [f"--{kind}=-all,+dac_read_search" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *reading, *command]


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    return subprocess.run(
        command, env=environment | options.pop("env", {}), capture_output=True, text=True, check=False, **options
    )


def test_without_cgroups_sandboxd_is_refused(tmp_path):
    done = run(as_nobody(*sandboxd_command(tmp_path, "--check")), cwd="/", timeout=60)
    assert done.returncode == REFUSED, done.stderr
    assert "no usable cgroup" in done.stderr
    assert CGROUPS_REMEDY in done.stderr


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare: apt-get install util-linux")
def test_even_root_is_refused_where_cgroups_are_hidden(tmp_path):
    hide = 'umount --recursive --lazy /sys/fs/cgroup && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", hide, "sh", *sandboxd_command(tmp_path, "--check")]
    done = run(command, cwd=ROOT, timeout=60)
    assert done.returncode == REFUSED, done.stderr
    assert "no memory hierarchy" in done.stderr
    assert "mount /sys/fs/cgroup read-write" in done.stderr


@pytest.mark.full
def test_the_suite_runs_for_an_unprivileged_user_and_says_what_is_refused(tmp_path):
    """Everything that needs no sandbox passes; everything else is skipped, with the refusal and its remedy."""
    settings = ["asyncio_mode = auto", "asyncio_default_fixture_loop_scope = function", "markers = full: slow tests"]
    (tmp_path / "pytest.ini").write_text("\n".join(["[pytest]", *settings]))
    suite = [sys.executable, "-m", "pytest", str(ROOT / "tests/rl_core/sandbox"), "-q", "-rs", "--color=no"]
    plain = ["-c", str(tmp_path / "pytest.ini"), f"--rootdir={ROOT}", f"--confcutdir={ROOT}/tests/rl_core/sandbox"]
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has 107 bytes
        Path(folder).chmod(0o777)
        quiet = ["-p", "no:cacheprovider", "-p", "no:django", f"--basetemp={folder}/t"]
        done = run(as_nobody(*suite, *plain, *quiet), cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    refusals = [line for line in done.stdout.splitlines() if "sandboxd refuses" in line]
    assert refusals, done.stdout
    assert all(CGROUPS_REMEDY in line for line in refusals)
    passed, skipped = (int(re.search(rf"(\d+) {word}", done.stdout)[1]) for word in ("passed", "skipped"))
    assert passed > 20
    assert skipped > 60


@contextlib.contextmanager
def delegated_groups(uid: int):
    """A v1 cgroup of each kind that a user may make groups in. Gives what puts a new process into them."""
    groups = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        if kind in ("memory", "pids", "cpu"):
            groups.append(Path("/sys/fs/cgroup") / kind / path.lstrip("/") / f"slipwaytest-{os.getpid()}")
    for group in groups:
        group.mkdir()
        for path in (group, *group.iterdir()):
            os.chown(path, uid, uid)
    try:
        yield lambda: [(group / "cgroup.procs").write_text(str(os.getpid())) for group in groups]
    finally:
        for group in groups:
            group.rmdir()


def check_as_user(*before: str) -> subprocess.CompletedProcess:
    """`sandboxd --check` as an ordinary user with delegated cgroups and a Python that every user can read."""
    packages = Path(sys.prefix) / f"lib/python{VERSION}/site-packages"
    user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *before]
    with delegated_groups(UID) as join:
        done = run(
            [*user, str(SYSTEM_PYTHON), "-m", "rl_core.sandbox", "--check"],
            cwd="/",
            env={"PYTHONPATH": f"{ROOT}:{packages}"},
            preexec_fn=join,
            timeout=60,
        )
    if "Permission denied" in done.stderr or "No module named" in done.stderr:
        pytest.skip("this checkout lies in a folder that other users cannot read")
    return done


@pytest.mark.full
@DELEGATES
def test_with_a_delegated_cgroup_it_runs():
    done = check_as_user()
    assert done.returncode != REFUSED, done.stderr
    assert "absent   own_user" in done.stdout
    assert "MISSING" not in done.stdout


@pytest.mark.full
@DELEGATES
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare: apt-get install util-linux")
def test_without_namespaces_of_users_it_is_refused():
    # The limit of a namespace of its own, so that the machine keeps its own.
    off = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --ambient-caps=-all --inh-caps=-all "$@"'
    done = check_as_user("unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", off, "sh")
    assert done.returncode == REFUSED, done.stdout + done.stderr
    assert USERS_REMEDY in done.stderr
