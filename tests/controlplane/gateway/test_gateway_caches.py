"""Values that may be a moment old: how old at most, and who waits for the next one."""

import asyncio

import pytest

from controlplane.gateway import caches
from controlplane.gateway.caches import FreshCache


class Source:
    """A load that is counted, held and failed at will."""

    def __init__(self):
        self.value, self.loads, self.error = 1, 0, None
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, key):
        self.loads += 1
        value = self.value
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return value


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(caches, "time", made)
    return made


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_fresh_value_is_not_loaded_again_and_an_old_one_is_waited_for(clock):
    source = Source()
    cache = FreshCache(source, fresh_s=1, max_age_s=3)
    assert [await cache.get("k"), await cache.get("k"), source.loads] == [1, 1, 1]
    source.value, clock.now = 2, 103.5
    assert [await cache.get("k"), source.loads] == [2, 2]


async def test_in_between_the_old_value_is_given_while_the_next_is_loaded(clock):
    source = Source()
    cache = FreshCache(source, fresh_s=1, max_age_s=3)
    await cache.get("k")
    source.value, clock.now = 2, 102
    assert [await cache.get("k"), await cache.get("k")] == [1, 1]
    await settle()
    assert [await cache.get("k"), source.loads] == [2, 2]


async def test_the_age_counts_from_when_the_load_was_asked_for(clock):
    """What was changed while it was under way may not be in it."""
    source = Source()
    source.open.clear()
    cache = FreshCache(source, fresh_s=1, max_age_s=3)
    waiting = asyncio.create_task(cache.get("k"))
    await settle()
    clock.now = 104
    source.open.set()
    assert await waiting == 1
    source.value = 2
    assert await cache.get("k") == 2


async def test_waiters_share_one_load_and_one_of_them_may_leave():
    source = Source()
    source.open.clear()
    cache = FreshCache(source, fresh_s=1, max_age_s=3)
    waiting = [asyncio.create_task(cache.get("k")) for _ in range(5)]
    await settle()
    waiting[0].cancel()
    await settle()
    source.open.set()
    assert await asyncio.gather(*waiting[1:]) == [1] * 4
    assert source.loads == 1


async def test_nothing_and_failures_are_not_kept():
    source = Source()
    source.value = None
    cache = FreshCache(source, fresh_s=1, max_age_s=3)
    assert [await cache.get("k"), await cache.get("k"), source.loads] == [None, None, 2]
    source.error = ValueError("down")
    with pytest.raises(ValueError, match="down"):
        await cache.get("k")
    source.error, source.value = None, 7
    assert await cache.get("k") == 7


async def test_what_is_gone_is_forgotten_by_the_load_in_the_background(clock):
    source = Source()
    cache = FreshCache(source, fresh_s=1, max_age_s=3)
    await cache.get("k")
    source.value, clock.now = None, 102
    assert await cache.get("k") == 1
    await settle()
    assert await cache.get("k") is None


async def test_a_failed_load_in_the_background_leaves_the_old_value_until_it_is_too_old(clock):
    source = Source()
    cache = FreshCache(source, fresh_s=1, max_age_s=3)
    await cache.get("k")
    source.error, clock.now = ValueError("down"), 102
    assert await cache.get("k") == 1
    await settle()
    assert await cache.get("k") == 1
    clock.now = 104
    with pytest.raises(ValueError, match="down"):
        await cache.get("k")


async def test_a_dropped_value_is_loaded_anew_whatever_is_under_way():
    source = Source()
    cache = FreshCache(source, fresh_s=1, max_age_s=3)
    source.open.clear()
    old = asyncio.create_task(cache.get("k"))
    await settle()
    cache.drop("k")
    source.value = 2
    new = asyncio.create_task(cache.get("k"))
    await settle()
    source.open.set()
    assert await asyncio.gather(old, new) == [1, 2]
    assert await cache.get("k") == 2


async def test_the_oldest_make_room():
    source = Source()
    cache = FreshCache(source, fresh_s=1, max_age_s=3, capacity=2)
    for key in ("a", "b", "c", "a"):
        await cache.get(key)
    assert source.loads == 4
    await cache.get("c")
    assert source.loads == 4
