"""A grader over HTTP: the trajectory is posted, signed as Standard Webhooks says, and a value comes back."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from blake3 import blake3

from rl_core.environments.criteria.graded import Graded, Params, Verdict
from rl_core.errors import GraderFailed, GraderRefused
from rl_core.signing import sign

VERSION = 1


class RemoteParams(Params, frozen=True):
    """Where to post, the name of the signing secret (`whsec_…`), and the bound of an answer.

    The task's reference goes along only with `reference`: whoever gets it can leak it.
    """

    url: str
    secret: str
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=300)] = 30.0
    reference: bool = False


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    value: Annotated[float, msgspec.Meta(ge=0, le=1)]
    reason: str = ""


async def remote(graded: Graded, params: RemoteParams) -> Verdict:
    """The value that the grader answers with. Raises: GraderFailed, GraderRefused."""
    secret = graded.need_outside().secret(params.secret, params.url)
    body = request_body(graded, params)
    # Equal for equal work: a grader that is asked again can know it.
    message_id = f"msg_{blake3(body).hexdigest()[:32]}"
    try:
        headers = sign(secret, body, message_id=message_id)
    except ValueError as error:
        raise GraderRefused(f"the grader secret {params.secret!r} signs nothing: {error}") from error
    answer = await graded.need_outside().ask(
        params.url, body=body, headers={**headers, "content-type": "application/json"}, timeout_s=params.timeout_s
    )
    try:
        given = msgspec.json.decode(answer, type=_Answer)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise GraderFailed(f"the grader's answer is not {{value, reason}}: {error}") from error
    return Verdict(given.value, " ".join(given.reason.split())[:400])


def request_body(graded: Graded, params: RemoteParams) -> bytes:
    """What is posted, as JSON: the criterion, the task as the policy had it, and what came of it."""
    task, trajectory = graded.task, graded.trajectory
    told: dict[str, Any] = {"id": task.id, "split": task.split.value, "input": task.input}
    if params.reference:
        told["reference"] = task.reference
    return msgspec.json.encode(
        {
            "version": VERSION,
            "criterion": graded.asked,
            "task": told,
            "trajectory": {
                "ending": trajectory.ending,
                "messages": [
                    {"role": m.role, "content": m.content, "name": m.name, "sampled": m.segment >= 0}
                    for m in trajectory.messages
                ],
                "tool_calls": trajectory.tool_calls,
                "artifacts": trajectory.artifacts,
            },
        },
        order="sorted",
    )
