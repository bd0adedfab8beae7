"""A remote world through the whole of the protocol: our client, HTTP, the reference server, a customer's world."""

import asyncio

import msgspec
import pytest

from rl_core.environments.remote.client import RemoteClient, RemotePlace
from rl_core.environments.remote.messages import Called, Opened
from rl_core.environments.remote.protocol import Ask, Kind
from rl_core.environments.remote.server import RemoteServer, serving
from rl_core.environments.remote.world import RemoteState, RemoteWorld
from rl_core.environments.tasks import Task
from rl_core.errors import RemoteBusy, RemoteDiverged, RemoteEnded, RemoteFailed, RemoteProtocolError, RemoteUnreachable
from rl_core.types import Split
from tests.rl_core.environments.remote.customers import OTHER_SECRET, SECRET, Counter

TASK = Task(id="t-1", split=Split.TRAIN, input={"prompt": "count"}, reference={"answer": 3})


@pytest.fixture
def counter():
    return Counter()


@pytest.fixture
def url(counter):
    with serving(RemoteServer(counter, secret=SECRET, max_open=2)) as url:
        yield url


def client_of(url: str, **options) -> RemoteClient:
    return RemoteClient(
        RemotePlace(url, options.pop("secret", SECRET)), **{"answer_s": 5.0, "patience_s": 0.5} | options
    )


async def test_a_session_is_played_from_state_to_state(url, counter):
    world = RemoteWorld(client_of(url))
    state = await world.open(task=TASK, key="s-1")
    first = await world.call(task=TASK, tool="add", arguments={"n": 1}, state=state, step="0")
    second = await world.call(task=TASK, tool="add", arguments={"n": 2}, state=first.state, step="1")
    assert (first.text, first.solved, second.text, second.solved) == ("1", False, "3", True)
    assert await world.export(task=TASK, state=second.state) == {"total": "3"}
    await world.close(task=TASK, state=second.state)
    await world.close(task=TASK, state=second.state)
    assert counter.closed == 1


async def test_the_reference_of_a_task_stays_with_us(url, counter):
    seen = []
    counter.open = lambda task: seen.append(task) or {"total": 0}
    await RemoteWorld(client_of(url)).open(task=TASK, key="s-1")
    assert seen == [{"id": "t-1", "split": "train", "input": {"prompt": "count"}}]


async def test_a_step_made_again_acts_once_and_answers_the_same(url, counter):
    world = RemoteWorld(client_of(url))
    state = await world.open(task=TASK, key="s-1")
    calls = [world.call(task=TASK, tool="add", arguments={"n": 1}, state=state, step="0") for _ in range(5)]
    results = await asyncio.gather(*calls)
    assert {result.text for result in results} == {"1"}
    assert counter.acts == 1
    assert await world.open(task=TASK, key="s-1") == results[0].state  # taken up by another process


async def test_the_same_number_for_another_call_is_refused(url, counter):
    world = RemoteWorld(client_of(url))
    state = await world.open(task=TASK, key="s-1")
    await world.call(task=TASK, tool="add", arguments={"n": 1}, state=state, step="0")
    with pytest.raises(RemoteDiverged, match="step_conflict"):
        await world.call(task=TASK, tool="add", arguments={"n": 2}, state=state, step="0")
    assert counter.acts == 1


async def test_a_step_out_of_order_is_refused_with_what_is_expected(url, counter):
    client = client_of(url)
    opened = await client.ask(Ask.WORLD_OPEN, Opened, key="s-1", task={"id": "t"})
    with pytest.raises(RemoteDiverged, match="step_out_of_order: step 0 comes next"):
        await client.ask(
            Ask.WORLD_CALL, Called, handle=opened.handle, number=1, step="1", tool="add", arguments={"n": 1}
        )
    assert counter.acts == 0


async def test_an_unknown_tool_is_the_policys_mistake(url):
    world = RemoteWorld(client_of(url))
    state = await world.open(task=TASK, key="s-1")
    result = await world.call(task=TASK, tool="rm", arguments={}, state=state, step="0")
    assert (result.ok, result.text) == (False, "Error: there is no tool named 'rm'")


async def test_a_handle_that_the_server_forgot_has_ended(url):
    state = msgspec.json.encode(RemoteState("nothing", 0))
    world = RemoteWorld(client_of(url))
    with pytest.raises(RemoteEnded, match="unknown"):
        await world.call(task=TASK, tool="add", arguments={"n": 1}, state=state, step="0")
    await world.close(task=TASK, state=state)


async def test_a_world_whose_lease_is_over_has_ended():
    now = [0.0]
    counter = Counter()
    server = RemoteServer(counter, secret=SECRET, lease_s=10, clock=lambda: now[0])
    with serving(server) as url:
        world = RemoteWorld(client_of(url))
        state = await world.open(task=TASK, key="s-1")
        now[0] = 9.0
        kept = await world.call(task=TASK, tool="add", arguments={"n": 1}, state=state, step="0")
        now[0] = 18.0  # every call renews the lease
        kept = await world.call(task=TASK, tool="add", arguments={"n": 1}, state=kept.state, step="1")
        now[0] = 29.0
        with pytest.raises(RemoteEnded, match="ended"):
            await world.call(task=TASK, tool="add", arguments={"n": 1}, state=kept.state, step="2")
    assert counter.closed == 1


async def test_a_full_server_asks_for_patience_and_gets_it(url):
    world = RemoteWorld(client_of(url, patience_s=5.0))
    states = [await world.open(task=TASK, key=f"s-{n}") for n in range(2)]
    waiting = asyncio.create_task(world.open(task=TASK, key="s-2"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await world.close(task=TASK, state=states[0])
    assert msgspec.json.decode(await waiting)["next"] == 0


async def test_patience_has_an_end(url):
    world = RemoteWorld(client_of(url, patience_s=0.1))
    for n in range(2):
        await world.open(task=TASK, key=f"s-{n}")
    with pytest.raises(RemoteBusy, match="429"):
        await world.open(task=TASK, key="s-2")


async def test_another_secret_is_refused_by_both_sides(url):
    with pytest.raises(RemoteProtocolError, match="another secret"):
        await client_of(url, secret=OTHER_SECRET).describe()


async def test_what_the_world_raises_is_the_environments_fault(url, counter):
    def broken(state, tool, arguments):
        raise RuntimeError("no such file")

    counter.call = broken
    world = RemoteWorld(client_of(url))
    state = await world.open(task=TASK, key="s-1")
    with pytest.raises(RemoteFailed, match="no such file"):
        await world.call(task=TASK, tool="add", arguments={"n": 1}, state=state, step="0")


async def test_a_world_is_described(url):
    described = await client_of(url).describe()
    assert described.kind is Kind.WORLD
    assert [tool.name for tool in described.tools] == ["add"]


async def test_nobody_there_is_unreachable():
    with pytest.raises(RemoteUnreachable):
        await client_of("http://127.0.0.1:9/").describe()
