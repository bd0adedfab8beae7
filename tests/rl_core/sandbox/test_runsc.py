"""The same interface over gVisor: what holds in one backend holds in the other."""

import asyncio
import shutil

import pytest

from rl_core.sandbox.protocol import MIB, Outcome, RunLimits, Service
from tests.rl_core.sandbox.attacks import CONTAINED, HARMLESS, attack
from tests.rl_core.sandbox.test_artifacts import GOOD
from tests.rl_core.sandbox.test_containment import host  # noqa: F401  # a fixture
from tests.rl_core.sandbox.test_limits import settled
from tests.rl_core.sandbox_process import running_sandboxd

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("runsc") is None, reason="needs runsc: apt-get install runsc"),
]
LIMITS = RunLimits(wall_s=60.0, cpu_s=20)
# What the sandbox's own kernel gives to its own programs: none of it is the machine's. They may harm the supervisor,
# whose report then is none.
OWN = {
    "process list", "kernel parameters", "netlink socket", "new user namespace", "pidfd of another", "ptrace",
    "memory of another", "kill the supervisor", "kill everybody", "shared memory", "write a device folder", "x32 calls",
    "io_uring", "device node",
}  # fmt: skip


@pytest.fixture(scope="module")
def gvisor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gvisor")
    with running_sandboxd(folder, "--slots", "2", "--ahead", "0", "--backend", "runsc", secret="a-secret") as daemon:
        yield daemon


def limits(**changes):
    return RunLimits(**{**{name: getattr(LIMITS, name) for name in RunLimits.__struct_fields__}, **changes})


async def test_its_health_names_the_kernel_of_its_own(gvisor):
    health = await gvisor.client.health()
    assert (health["backend"], health["layers"]["own_kernel"]) == ("runsc", True)


@pytest.mark.parametrize("name", sorted((HARMLESS | CONTAINED).keys() - OWN))
async def test_an_attack_is_held(gvisor, host, name):  # noqa: F811
    code = HARMLESS[name].format(**host) if name in HARMLESS else CONTAINED[name]
    result = await gvisor.client.run(code=attack(code), limits=LIMITS)
    assert result.stdout.startswith(b"held"), result


@pytest.mark.parametrize(
    ("code", "changes", "outcomes"),
    [
        ("while True: pass", {"cpu_s": 1}, {Outcome.TIMEOUT, Outcome.KILLED}),
        ("import time\ntime.sleep(60)", {"wall_s": 3.0}, {Outcome.TIMEOUT}),
        ("print('x' * 5_000_000)", {}, {Outcome.OUTPUT_LIMIT}),
        ("x = bytearray(1 << 30)\nfor n in range(0, 1 << 30, 4096): x[n] = 1", {}, {Outcome.MEMORY}),
        (
            "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            {"wall_s": 5.0},
            set(Outcome) - {Outcome.OK},
        ),
    ],
)
async def test_what_it_cannot_use_up(gvisor, code, changes, outcomes):
    result = await gvisor.client.run(code=code, limits=limits(**changes))
    assert result.outcome in outcomes, result
    assert await settled(gvisor) == []


async def test_the_disk_is_small(gvisor):
    code = "import os\nn = 0\ntry:\n    while True: n += open(f'/work/{n}', 'wb', 0).write(bytes(65536))\n"
    result = await gvisor.client.run(code=code + "except OSError: print(n)", limits=limits(disk_bytes=1 * MIB))
    assert 0 < int(result.stdout) <= 1 * MIB, result


async def test_commands_input_files_and_artefacts(gvisor):
    result = await gvisor.client.run(code=GOOD, limits=LIMITS)
    assert result.artifacts == {"good.txt": b"good", "a/b/c": bytes(range(256))}
    echoed = await gvisor.client.run(["sh", "-c", "cat f; cat; exit 3"], files={"f": b"1"}, stdin=b"2", limits=LIMITS)
    assert (echoed.stdout, echoed.exit_code) == (b"12", 3)
    void = await gvisor.client.run(code=GOOD + "os.symlink('/etc/passwd', 'out/link')", limits=LIMITS)
    assert (void.artifacts, void.artifacts_refused) == ({}, "link is not a regular file")


async def test_a_layer_goes_out_and_in_and_a_service_serves(gvisor):
    base = await gvisor.client.freeze({"a": b"a", "d/b": b"b"})
    first = await gvisor.client.run(["sh", "-c", "rm a; echo new > d/new"], base=base, limits=LIMITS)
    assert first.layer == {"a": None, "d/new": b"new\n"}, first
    serve = "trap 'echo stopped > said; exit' TERM; echo up > /work/tmp/up; while :; do sleep 0.1; done"
    service = Service(argv=["sh", "-c", serve], ready_path="/work/tmp/up")
    second = await gvisor.client.run(
        ["cat", "d/new", "/work/tmp/up"], base=base, layer=first.layer, services=[service], limits=LIMITS
    )
    assert second.stdout == b"new\nup\n", second
    assert second.layer == {"a": None, "d/new": b"new\n", "said": b"stopped\n"}


async def test_worlds_wait_for_their_jobs(tmp_path):
    with running_sandboxd(tmp_path, "--ahead", "2", "--backend", "runsc") as daemon:
        while (await daemon.client.health())["ahead"] != 2:
            await asyncio.sleep(0.1)
        results = [await daemon.client.run(code="print(6 * 7)", limits=RunLimits()) for _ in range(2)]
    assert [result.stdout for result in results] == [b"42\n"] * 2
    assert await settled(daemon) == []
