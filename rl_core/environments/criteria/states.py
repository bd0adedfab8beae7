"""The state in which a world was left, as a criterion: what was done counts, not what was said of it."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_core.environments.criteria.graded import Graded, Params, Verdict
from rl_core.errors import WorldError

_ABSENT = object()


class FinalStateParams(Params, frozen=True):
    """The artefact that holds the state as JSON; the reference's value of that name is what it should be.

    With `partial`, the share of the changes that were to be made: 0 when anything else was changed. The task's input
    has the state as it was found, under the same name.
    """

    artifact: str = "state"
    partial: bool = False


async def final_state(graded: Graded, params: FinalStateParams) -> Verdict:
    """1 when the state is as it should be. Raises: WorldError when the world exported none."""
    wanted = graded.reference(params.artifact)
    text = graded.trajectory.artifacts.get(params.artifact)
    try:
        left = msgspec.json.decode(text or "")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise WorldError(f"the world exported no state as {params.artifact!r}: {error}") from error
    if left == wanted:
        return Verdict(1.0, "the state is as it should be")
    found = _leaves(graded.task.input.get(params.artifact, {}))
    changed, right = _differing(found, _leaves(left)), _differing(found, _leaves(wanted))
    wrong = sorted(path for path, value in changed.items() if right.get(path, found.get(path, _ABSENT)) != value)
    if wrong:
        return Verdict(0.0, f"{len(wrong)} wrong changes, first {wrong[0][:100]}")
    reason = f"{len(changed)} of {len(right)} changes were made"
    return Verdict(len(changed) / len(right) if params.partial and right else 0.0, reason)


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Values by their place, e.g. `items.K-1.stock`; an empty object or list is a value too."""
    inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    leaves: dict[str, Any] = {}
    for key, part in inner:
        leaves |= _leaves(part, f"{path}.{key}" if path else str(key))
    return leaves if inner else {path: value}


def _differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    paths = before.keys() | after.keys()
    return {path: after.get(path, _ABSENT) for path in paths if before.get(path, _ABSENT) != after.get(path, _ABSENT)}
