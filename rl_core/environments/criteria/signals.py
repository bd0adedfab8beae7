"""What a user's signal said of the work, as a criterion."""

from __future__ import annotations

import math

from rl_core.environments.criteria.graded import Graded, Params, Verdict
from rl_core.errors import GraderFailed, SpecError


class UserSignalParams(Params, frozen=True):
    """The signal by its name. Its value counts linearly: `worst` is 0, `best` is 1, beyond them nothing is added."""

    signal: str
    worst: float = 0.0
    best: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.worst) and math.isfinite(self.best)) or self.worst == self.best:
            raise SpecError("worst and best must be two numbers")


async def user_signal(graded: Graded, params: UserSignalParams) -> Verdict:
    """The signal's value between worst and best. Raises: GraderFailed where nobody gave it: silence is no score."""
    value = graded.signals.get(params.signal)
    if value is None or not math.isfinite(value):
        raise GraderFailed(f"no value of the signal {params.signal!r} is joined to this work (yet)")
    share = (value - params.worst) / (params.best - params.worst)
    return Verdict(min(1.0, max(0.0, share)), f"{params.signal} is {value:g}")
