"""What a remote environment reported of its own session."""

from __future__ import annotations

from rl_core.environments.criteria.graded import Graded, Params, Verdict
from rl_core.errors import EnvironmentFault


class ReportedParams(Params, frozen=True):
    """The score's name; a single reward is reported under `reward`."""

    name: str = "reward"


async def reported(graded: Graded, params: ReportedParams) -> Verdict:
    """The score as it came. Raises: EnvironmentFault when none of that name was reported: never a guess."""
    value = graded.trajectory.reported.get(params.name)
    if value is None:
        known = ", ".join(sorted(graded.trajectory.reported)) or "nothing"
        raise EnvironmentFault(f"the environment reported no score {params.name!r}; it reported {known}")
    return Verdict(value, "as reported")
