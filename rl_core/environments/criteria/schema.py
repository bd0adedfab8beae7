"""JSON that fits a schema: the last turn, or an artefact. The schema is its author's, so its work is bounded."""

from __future__ import annotations

import json
import re
from typing import Any

from rl_core.environments.criteria.graded import MAX_MATCHED_CHARS, Graded, Params, Verdict
from rl_core.environments.schemas import check_schema, misfit
from rl_core.errors import SpecError

MAX_SCHEMA_CHARS = 20_000
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n\s*```\s*", re.DOTALL)


class SchemaParams(Params, frozen=True):
    """A JSON schema (2020-12). `artifact` names an artefact to read instead of the last turn.

    A turn may be a fenced block of JSON and nothing else.
    """

    schema: dict[str, Any]
    artifact: str = ""

    def __post_init__(self) -> None:
        check_schema(self.schema)
        size = len(json.dumps(self.schema))
        if size > MAX_SCHEMA_CHARS:
            raise SpecError(f"the schema has {size} characters; at most {MAX_SCHEMA_CHARS}")


async def fits_schema(graded: Graded, params: SchemaParams) -> Verdict:
    """1 when it is JSON that fits. Raises: EnvironmentFault for a schema that takes too long or does not resolve."""
    text = graded.text(params.artifact)
    fenced = _FENCE.fullmatch(text) if len(text) <= MAX_MATCHED_CHARS else None
    try:
        value = json.loads(fenced[1] if fenced else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return Verdict(0.0, "it is not JSON")
    error = misfit(params.schema, value)
    if error is None:
        return Verdict(1.0, "it fits the schema")
    return Verdict(0.0, f"at {error.json_path[:80]}: {' '.join(error.message.split())[:160]}")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
