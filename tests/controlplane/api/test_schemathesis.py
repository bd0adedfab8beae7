"""Every operation of the OpenAPI document, with inputs that fit it and inputs that do not: no 5xx, nothing that the
document does not name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from controlplane.api.document import openapi_yaml
from tests.controlplane.api.api_factories import World, make_key, make_user, make_world
from tests.controlplane.api.web_process import serving

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

EXAMPLES = 12
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@schemathesis.serializer("application/x-ndjson", "application/vnd.apache.parquet")
def file_as_it_is(context: Any, value: Any) -> bytes:
    """The body of an upload: bytes, or what a negative case sends in their place."""
    data = getattr(value, "data", value)
    return bytes(data) if isinstance(data, bytes | bytearray) else str(data).encode(errors="replace")


@pytest.fixture
def server(test_database_url: str, tmp_path) -> Iterator[str]:
    with serving(test_database_url, log=tmp_path / "web.log") as url:
        yield url


def known_parameters(world: World) -> dict[str, list[str]]:
    """Path parameters of things that exist, so that calls get past 404."""
    spare, _ = make_key(world.project)
    rows = [world.task_set, world.task, world.replica, world.version, world.transfer, world.run, world.evaluation]
    rows += [world.group, world.rollout, world.unit, world.dead, world.attempt, world.export, spare]
    rows += [make_user(world.project).memberships.get()]
    return {
        "project": [world.project.slug],
        "id": [str(row.pk) for row in rows],
        "slug": ["tiny", "sums", "eu", "word-problems"],
        "number": ["1"],
        "name": ["config.json"],
    }


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_5xx_and_no_undocumented_answer(server: str, mode: GenerationMode) -> None:
    world = make_world()
    _, token = make_key(world.project)
    known = known_parameters(world)
    schema = schemathesis.openapi.from_dict(yaml.safe_load(openapi_yaml()))
    schema.config.update(base_url=server)
    session_headers = {"Authorization": f"Bearer {token}"}
    statuses: dict[int, int] = {}
    failures: list[str] = []
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
        def check(case: Any, data: Any) -> None:
            for name, values in known.items():
                if name in case.path_parameters and data.draw(st.integers(0, 3)):
                    case.path_parameters[name] = data.draw(st.sampled_from(values))
            response = case.call(headers=session_headers)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            case.validate_response(response, checks=CHECKS)

        try:
            check()
        except FailureGroup as group:
            failures += [f"{operation.label}: {failure}" for failure in group.exceptions]
    assert not failures, "\n\n".join(failures)
    assert statuses.get(422, 0) > 50
    assert mode is GenerationMode.NEGATIVE or statuses.get(200, 0) > 200, statuses
    assert sum(statuses.values()) > 500, statuses
