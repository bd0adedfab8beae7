"""Whose turn it is: clients take turns, one by one, and what waits is bounded."""

import asyncio

import pytest

from rl_core.sandbox.turns import SandboxBusy, Turns


async def served(turns, asks):
    """The order in which asks of these clients, made in this order while a turn is taken, are served."""
    order = []

    async def ask(client):
        async with turns.one(client, 1):
            order.append(client)
            await asyncio.sleep(0)

    async with turns.one("first", 1):
        waiting = [asyncio.create_task(ask(client)) for client in asks]
        while turns.queued < len(asks):
            await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert (turns.running, turns.queued) == (0, 0)
    return "".join(order)


def turns(at_once=1, max_queued=500, max_queued_bytes=10_000):
    return Turns(at_once, max_queued=max_queued, max_queued_bytes=max_queued_bytes)


async def test_one_asker_behind_a_burst_waits_for_one_run_of_it():
    order = await served(turns(), "b" * 500 + "a")
    assert order == "ba" + "b" * 499


async def test_clients_take_turns():
    assert await served(turns(), "aaaabbc") == "abcabaa"
    assert await served(turns(), "aabbcc") == "abcabc"


async def test_a_client_that_comes_again_waits_behind_the_others():
    order = []
    several = turns()

    async def ask(client, times):
        for _ in range(times):
            async with several.one(client, 1):
                order.append(client)
                await asyncio.sleep(0)

    await asyncio.gather(ask("a", 3), *(ask("b", 1) for _ in range(3)))
    assert "".join(order) == "ababab"


async def test_turns_are_no_more_than_there_are():
    several, at_once = turns(at_once=3), []

    async def ask(client):
        async with several.one(client, 1):
            at_once.append(several.running)
            await asyncio.sleep(0)

    await asyncio.gather(*(ask(str(number % 4)) for number in range(40)))
    assert max(at_once) == 3
    assert several.idle


async def test_what_waits_is_bounded_for_each_client_and_for_all():
    few = turns(max_queued=2)
    asks = [few.one(client, 1) for client in "aaabbccdde"]
    async with few.one("first", 1):
        waiting = [asyncio.create_task(ask.__aenter__()) for ask in asks]
        await asyncio.sleep(0)
        refused = [index for index, task in enumerate(waiting) if task.done() and task.exception()]
        assert refused == [2, 9]  # a third of one client, a ninth of all
        with pytest.raises(SandboxBusy, match="8 of all wait"):
            await asyncio.wait_for(few.one("f", 1).__aenter__(), 1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert (few.running, few.queued) == (0, 0)


async def test_the_bytes_that_wait_are_bounded():
    few = turns(max_queued_bytes=100)
    async with few.one("first", 1_000):
        with pytest.raises(SandboxBusy, match="0 bytes wait"):
            await asyncio.wait_for(few.one("a", 101).__aenter__(), 1)


async def test_a_turn_given_to_a_client_that_left_goes_on_to_the_next():
    one = turns()
    async with one.one("first", 1):
        asks = [one.one(client, 1) for client in "ab"]
        leaving, staying = (asyncio.create_task(ask.__aenter__()) for ask in asks)
        while one.queued < 2:
            await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.wait_for(staying, 1)
    assert (one.running, one.queued) == (1, 0)
