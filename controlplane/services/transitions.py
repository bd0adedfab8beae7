"""State changes as compare-and-set: the row moves only from a state that the table allows, or not at all."""

from __future__ import annotations

from typing import Any, TypeVar

from django.db import models
from django.db.models import TextChoices

from controlplane.errors import Conflict, IllegalTransition
from controlplane.states import TRANSITIONS

M = TypeVar("M", bound=models.Model)


def sources_of(target: TextChoices) -> list[str]:
    """The states from which `target` may be entered."""
    return [source.value for source, targets in TRANSITIONS[type(target)].items() if target in targets]


def transition(row: M, *, to: TextChoices, **changes: Any) -> M:
    """Move `row` from the state it was read in to `to`, writing `changes` with it.

    The update names the state the caller saw, so of two racing callers one wins and the other is refused. The caller
    appends the event in the same transaction.

    Raises: IllegalTransition when the table has no such change; Conflict when the row has moved meanwhile.
    """
    seen = type(to)(row.state)  # type: ignore[attr-defined]
    name = type(row).__name__
    if to not in TRANSITIONS[type(to)][seen]:
        raise IllegalTransition(f"{name} {row.pk} is {seen.value}: it cannot become {to.value}")
    manager: Any = type(row)._default_manager
    updated = manager.filter(pk=row.pk, state=seen).update(state=to, **changes)
    if updated != 1:
        raise Conflict(f"{name} {row.pk} is no longer {seen.value}; read it again")
    row.state = to  # type: ignore[attr-defined]
    for field, value in changes.items():
        setattr(row, field, value)
    return row
