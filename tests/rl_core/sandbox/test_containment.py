"""What model-written code cannot reach; each harmless attack is shown to work where nothing holds it."""

import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import threading

import pytest

from rl_core.sandbox.protocol import Outcome, RunLimits
from tests.rl_core.sandbox.attacks import CONTAINED, HARMLESS, attack
from tests.rl_core.sandbox.conftest import SECRET

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks name x86-64 system calls")
LIMITS = RunLimits(wall_s=20.0)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Things on the host that an attack would like to reach: a loopback service, an abstract socket, a file."""
    path = tmp_path_factory.mktemp("host") / "secret.txt"
    path.write_text("the host's")
    abstract = f"\0slipway-test-{os.getpid()}"
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(abstract)
    listeners[1].listen()
    threads = [threading.Thread(target=serve, args=(listener,)) for listener in listeners]
    for thread in threads:
        thread.start()
    yield {"port": listeners[0].getsockname()[1], "abstract": abstract, "path": str(path)}
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


def serve(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.send(b"secret")


@pytest.mark.parametrize("name", HARMLESS)
async def test_a_harmless_attack_is_held_and_works_outside(sandbox, host, name):
    code = attack(HARMLESS[name].format(**host))
    result = await sandbox.run(code=code, limits=LIMITS)
    assert result.stdout.startswith(b"held"), result
    outside = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-I", "-c", code],
        env={"SLIPWAY_SECRET": SECRET},
        capture_output=True,
        check=False,
    )
    assert outside.stdout.startswith(b"ESCAPED"), outside


@pytest.mark.parametrize("name", CONTAINED)
async def test_an_attack_is_held(sandbox, name):
    result = await sandbox.run(code=attack(CONTAINED[name]), limits=LIMITS)
    assert result.stdout.startswith(b"held"), result
    assert result.outcome is Outcome.OK


async def test_the_inside_is_bare(sandbox):
    names = sorted(os.listdir("/"))
    code = (
        f"import json, os\nroot = [n for n in {names} if os.path.lexists('/' + n)]\n"
        "print(json.dumps([root, list(os.environ), os.listdir('/python/lib'), os.getcwd()]))"
    )
    result = await sandbox.run(code=code, limits=LIMITS)
    root, environment, libraries, cwd = json.loads(result.stdout)
    assert set(root) <= {"bin", "dev", "etc", "lib", "lib64", "opt", "tmp", "usr", "work"}
    assert set(environment) <= {
        "HOME",
        "LANG",
        "LC_CTYPE",
        "LD_LIBRARY_PATH",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
        "TMPDIR",
    }
    assert all(name.startswith(("python", "libpython")) for name in libraries)
    assert cwd == "/work"


async def test_one_run_cannot_signal_another(sandbox):
    victim = asyncio.create_task(sandbox.run(code="import time; time.sleep(1.5); print('alive')", limits=LIMITS))
    await asyncio.sleep(0.5)
    hunter = (
        "import os\nfor pid in set(range(3, 40000)) - {os.getpid()}:\n"
        "    try: os.kill(pid, 9)\n    except OSError: pass"
    )
    await sandbox.run(code=hunter, limits=LIMITS)
    assert (await victim).stdout == b"alive\n"


async def test_runs_share_nothing(sandbox):
    await sandbox.run(code="open('/work/left', 'w').write('x'); open('/tmp/left', 'w').write('x')", limits=LIMITS)
    result = await sandbox.run(code="import os; print(os.listdir('/work'), os.listdir('/tmp'))", limits=LIMITS)
    assert b"left" not in result.stdout
