"""Joining the routed experts of a session's calls into one table for its segment."""

from __future__ import annotations

from rl_core.errors import TrajectoryError
from rl_core.types import Routes

_WIDTHS = {"uint8": 1, "uint16": 2}


def join_routes(earlier: Routes | None, later: Routes | None, *, first_turn: bool) -> Routes | None:
    """The segment's routes after a call: earlier rows as they were when sampled, later rows for what is new.

    A later call computes every row of its prompt again, perhaps with newer weights; the earlier row is the one the
    recorded logprob came from. A turn without routes voids the table, because rows must be contiguous from 0.
    Raises: TrajectoryError when the two calls describe different models.
    """
    if first_turn or earlier is None or later is None:
        return later if first_turn else None
    if (earlier.layers, earlier.top_k, earlier.dtype) != (later.layers, later.top_k, later.dtype):
        raise TrajectoryError("routed experts of two calls of one session have different shapes: not the same model")
    if later.tokens < earlier.tokens:
        raise TrajectoryError(f"a later call routes {later.tokens} tokens, an earlier one {earlier.tokens}")
    row = earlier.layers * earlier.top_k * _WIDTHS[earlier.dtype]
    data = earlier.data + later.data[earlier.tokens * row :]
    return Routes(later.tokens, later.layers, later.top_k, later.dtype, data)
