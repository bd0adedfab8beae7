"""The stockroom's tools, and the world that answers them. Its state is the stockroom itself, encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from rl_core.environments.stockroom.shelves import MAX_QUANTITY, Refused, Stockroom
from rl_core.environments.tasks import Task
from rl_core.environments.tool_syntax import Tool
from rl_core.environments.world import ToolResult
from rl_core.errors import TaskSetError, WorldError

STATE: Final = "state"  # of a task's input: the stockroom as it is found; and the artefact: as it was left
_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": 80}
_QUANTITY: Final = {"type": "integer", "minimum": 1, "maximum": MAX_QUANTITY}


def _tool(name: str, description: str, *, read_only: bool = False, **properties: dict[str, Any]) -> Tool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Tool(name=name, description=description, parameters=parameters, read_only=read_only)


TOOLS: Final = (
    _tool("find_items", "Numbers of the items whose name has this text.", read_only=True, text=_TEXT),
    _tool("get_item", "Name, stock, price in cents and shelf of an item.", read_only=True, sku=_TEXT),
    _tool("list_orders", "What a customer has on order.", read_only=True, customer=_TEXT),
    _tool("receive", "Add to the stock of an item what came in.", sku=_TEXT, quantity=_QUANTITY),
    _tool("move", "Put an item on another shelf.", sku=_TEXT, shelf=_TEXT),
    _tool("order", "Order an item for a customer, out of stock.", customer=_TEXT, sku=_TEXT, quantity=_QUANTITY),
    _tool("cancel", "Cancel a customer's order of an item.", customer=_TEXT, sku=_TEXT),
)

_READS: Final[dict[str, Callable[..., Any]]] = {
    "find_items": lambda room, text: room.find(text),
    "get_item": lambda room, sku: room.item(sku),
    "list_orders": lambda room, customer: room.orders.get(customer, {}),
}
_WRITES: Final[dict[str, Callable[..., Stockroom]]] = {
    "receive": Stockroom.receive,
    "move": Stockroom.move,
    "order": Stockroom.order,
    "cancel": Stockroom.cancel,
}


def act(room: Stockroom, tool: str, arguments: dict[str, Any]) -> tuple[str, Stockroom]:
    """What a tool answers, and the stockroom after it. Raises: Refused."""
    if tool in _READS:
        return msgspec.json.encode(_READS[tool](room, **arguments)).decode(), room
    return "done", _WRITES[tool](room, **arguments)


class StockroomWorld:
    """See World. It keeps nothing: calls act on the state alone, so a step that is made again does nothing twice."""

    async def open(self, *, task: Task, key: str) -> bytes:
        """The stockroom of the task. Raises: TaskSetError."""
        try:
            return msgspec.convert(task.input.get(STATE), Stockroom).encode()
        except msgspec.ValidationError as error:
            raise TaskSetError(f"task {task.id}: input.state is no stockroom: {error}") from error

    async def call(self, *, task: Task, tool: str, arguments: dict[str, Any], state: bytes, step: str) -> ToolResult:
        """See World."""
        room = _decoded(state)
        try:
            text, after = act(room, tool, arguments)
        except Refused as problem:
            return ToolResult(text=f"Error: {problem}", ok=False)
        return ToolResult(text=text, ok=True, state=None if after is room else after.encode())

    async def export(self, *, task: Task, state: bytes) -> dict[str, str]:
        """The stockroom as it was left."""
        return {STATE: _decoded(state).encode().decode()}

    async def close(self, *, task: Task, state: bytes) -> None:
        """See World: there is nothing to take down."""


def _decoded(state: bytes) -> Stockroom:
    try:
        return msgspec.json.decode(state, type=Stockroom)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise WorldError(f"not a stockroom's state: {error}") from error
