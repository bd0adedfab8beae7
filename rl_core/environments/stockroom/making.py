"""Tasks of the stockroom, drawn from a seed: what is asked, calls of one way to do it, the state they lead to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rl_core.environments.stockroom.shelves import Item, Stockroom
from rl_core.environments.stockroom.world import STATE, act
from rl_core.environments.tasks import Task, TaskSet
from rl_core.types import Split

_KINDS: Final = ("bolt", "nut", "screw", "washer", "hinge", "bracket", "spring", "gasket")
_SIZES: Final = ("small", "medium", "large")
_CUSTOMERS: Final = ("Ana", "Bo", "Cem", "Dora", "Eli", "Fay")
_SHELVES: Final = ("A1", "A2", "B1", "B2", "C1")
ITEMS = 9

Called = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked, and turns of calls that do it: those of one turn do not need each other's answers."""

    question: str
    turns: Sequence[Sequence[Called]]


def make_tasks(*, seed: int, train: int, heldout: int) -> TaskSet:
    """The same tasks for the same seed. The held-out split has a kind of task that training never shows."""
    rows = [(Split.TRAIN, n, TEMPLATES) for n in range(train)]
    rows += [(Split.HELDOUT, n, {**TEMPLATES, **UNSEEN_TEMPLATES}) for n in range(heldout)]
    return TaskSet(tuple(_task(seed, split, number, templates) for split, number, templates in rows))


def _task(seed: int, split: Split, number: int, templates: dict[str, Template]) -> Task:
    name = list(templates)[number % len(templates)]
    rng = random.Random(f"{seed}/{split.value}/{number}")
    while True:
        room = _room(rng)
        asked = templates[name](room, rng)
        if asked is not None:
            break
    after = room
    for turn in asked.turns:
        for tool, arguments in turn:
            _, after = act(after, tool, arguments)
    return Task(
        id=f"{split.value}-{name}-{number}",
        split=split,
        input={"question": asked.question, STATE: msgspec.to_builtins(room)},
        reference={
            STATE: msgspec.to_builtins(after),
            "turns": [[{"name": tool, "arguments": arguments} for tool, arguments in turn] for turn in asked.turns],
            "template": name,
        },
    )


def _room(rng: random.Random) -> Stockroom:
    names = rng.sample([f"{size} {kind}" for kind in _KINDS for size in _SIZES], ITEMS)
    items = {
        f"{letter}-{rng.randrange(100, 1000)}": Item(
            name=name, stock=rng.randrange(0, 40), price=rng.randrange(5, 500) * 5, shelf=rng.choice(_SHELVES)
        )
        for letter, name in zip("KLMNPQRST", names, strict=True)
    }
    room = Stockroom(items=items)
    for customer in rng.sample(_CUSTOMERS, 3):
        sku = rng.choice([key for key, item in room.items.items() if item.stock] or list(items))
        if room.items[sku].stock:
            room = room.order(customer, sku, rng.randint(1, room.items[sku].stock))
    return room


def _restock(room: Stockroom, rng: random.Random) -> Asked | None:
    """Read two items, receive what is missing."""
    wanted = rng.randrange(20, 60)
    low = [sku for sku, item in room.items.items() if item.stock < wanted]
    if len(low) < 2:
        return None
    skus = rng.sample(low, 2)
    names = " and ".join(room.items[sku].name for sku in skus)
    return Asked(
        f"New stock of {names} came in. Receive as much of each that there are {wanted} in stock.",
        [
            [("find_items", {"text": room.items[sku].name}) for sku in skus],
            [("get_item", {"sku": sku}) for sku in skus],
            [("receive", {"sku": sku, "quantity": wanted - room.items[sku].stock}) for sku in skus],
        ],
    )


def _cheapest(room: Stockroom, rng: random.Random) -> Asked | None:
    """Find all of a kind, order the cheapest."""
    kind = rng.choice(_KINDS)
    found = room.find(kind)
    prices = [room.items[sku].price for sku in found]
    if len(found) < 2 or len(set(prices)) < len(prices):
        return None
    sku = min(found, key=lambda one: room.items[one].price)
    if not room.items[sku].stock:
        return None
    customer, quantity = rng.choice(_CUSTOMERS), rng.randint(1, room.items[sku].stock)
    return Asked(
        f"{customer} wants {quantity} of the cheapest {kind} that we have. Order it.",
        [
            [("find_items", {"text": kind})],
            [("get_item", {"sku": one}) for one in found],
            [("order", {"customer": customer, "sku": sku, "quantity": quantity})],
        ],
    )


def _replace(room: Stockroom, rng: random.Random) -> Asked | None:
    """Cancel what a customer has on order, order as much of another item."""
    customer = rng.choice(list(room.orders))
    (old, quantity), *more = room.orders[customer].items()
    others = [sku for sku, item in room.items.items() if sku != old and item.stock >= quantity]
    if more or not others:
        return None
    new = rng.choice(others)
    return Asked(
        f"Cancel what {customer} has on order, and order as many of {room.items[new].name} for {customer} instead.",
        [
            [("list_orders", {"customer": customer}), ("find_items", {"text": room.items[new].name})],
            [("cancel", {"customer": customer, "sku": old})],
            [("order", {"customer": customer, "sku": new, "quantity": quantity})],
        ],
    )


def _gather(room: Stockroom, rng: random.Random) -> Asked | None:
    """Move all of a kind to one shelf, but for those that are there."""
    kind, shelf = rng.choice(_KINDS), rng.choice(_SHELVES)
    found = room.find(kind)
    away = [sku for sku in found if room.items[sku].shelf != shelf]
    if len(found) < 2 or not away:
        return None
    return Asked(
        f"Put every {kind} on shelf {shelf}.",
        [
            [("find_items", {"text": kind})],
            [("get_item", {"sku": sku}) for sku in found],
            [("move", {"sku": sku, "shelf": shelf}) for sku in away],
        ],
    )


def _hand_over(room: Stockroom, rng: random.Random) -> Asked | None:
    """One customer takes over what another has on order."""
    giver = rng.choice(list(room.orders))
    taker = rng.choice([name for name in _CUSTOMERS if name != giver])
    lines = room.orders[giver]
    return Asked(
        f"{taker} takes over all that {giver} has on order. Change the orders.",
        [
            [("list_orders", {"customer": giver})],
            [("cancel", {"customer": giver, "sku": sku}) for sku in lines],
            [("order", {"customer": taker, "sku": sku, "quantity": count}) for sku, count in lines.items()],
        ],
    )


Template = Callable[[Stockroom, random.Random], Asked | None]
TEMPLATES: Final[dict[str, Template]] = {
    "restock": _restock,
    "cheapest": _cheapest,
    "replace": _replace,
    "gather": _gather,
}
UNSEEN_TEMPLATES: Final[dict[str, Template]] = {"hand-over": _hand_over}
