"""The stockroom as a value: items with their stock, price and shelf, and what each customer has on order.

Every operation makes a new stockroom from an old one. Orders are kept by customer and item, so that the order in which
calls are made leaves no trace: two policies that do the same things end in the same state.
"""

from __future__ import annotations

import msgspec

MAX_QUANTITY = 10_000


class Refused(Exception):
    """An operation that the stockroom does not do; the message is shown to the policy."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of thing. `price` is in cents."""

    name: str
    stock: int
    price: int
    shelf: str


class Stockroom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All there is: items by number, and quantities on order by customer and item."""

    items: dict[str, Item]
    orders: dict[str, dict[str, int]] = {}

    def item(self, sku: str) -> Item:
        """Raises: Refused."""
        try:
            return self.items[sku]
        except KeyError:
            raise Refused(f"there is no item {sku[:40]!r}") from None

    def find(self, text: str) -> list[str]:
        """Numbers of the items whose name has the text."""
        return [sku for sku, item in self.items.items() if text.lower() in item.name.lower()]

    def receive(self, sku: str, quantity: int) -> Stockroom:
        """More of an item came in. Raises: Refused."""
        item = self.item(sku)
        return self._with(sku, msgspec.structs.replace(item, stock=item.stock + quantity))

    def move(self, sku: str, shelf: str) -> Stockroom:
        """An item goes to another shelf. Raises: Refused."""
        item = self.item(sku)
        if item.shelf == shelf:
            raise Refused(f"{sku} is on shelf {shelf} already")
        return self._with(sku, msgspec.structs.replace(item, shelf=shelf))

    def order(self, customer: str, sku: str, quantity: int) -> Stockroom:
        """Take an item out of stock for a customer. Raises: Refused when there is not so much."""
        item = self.item(sku)
        if item.stock < quantity:
            raise Refused(f"there are only {item.stock} of {sku} in stock")
        lines = self.orders.get(customer, {})
        lines = {**lines, sku: lines.get(sku, 0) + quantity}
        after = self._with(sku, msgspec.structs.replace(item, stock=item.stock - quantity))
        return msgspec.structs.replace(after, orders={**self.orders, customer: lines})

    def cancel(self, customer: str, sku: str) -> Stockroom:
        """Put what a customer has on order of an item back into stock. Raises: Refused."""
        lines = self.orders.get(customer, {})
        if sku not in lines:
            raise Refused(f"{customer[:40]} has no {sku[:40]} on order")
        after = self.receive(sku, lines[sku])
        rest = {key: quantity for key, quantity in lines.items() if key != sku}
        others = {name: kept for name, kept in self.orders.items() if name != customer}
        return msgspec.structs.replace(after, orders={**others, customer: rest} if rest else others)

    def encode(self) -> bytes:
        """Canonical JSON: equal stockrooms give equal bytes."""
        return msgspec.json.encode(self, order="sorted")

    def _with(self, sku: str, item: Item) -> Stockroom:
        return msgspec.structs.replace(self, items={**self.items, sku: item})
