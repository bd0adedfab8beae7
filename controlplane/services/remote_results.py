"""Results of remote sessions, as environments post them: verified before they are read."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import msgspec

from controlplane.errors import Invalid, NotFound
from controlplane.models import RolloutSession
from controlplane.selectors.environments import PURPOSE
from controlplane.services.rollout_sessions import rollout_session_report
from controlplane.services.sealing import unseal
from controlplane.services.sources import BadSignature
from rl_core import signing
from rl_core.environments.remote.messages import Reported
from rl_core.environments.remote.protocol import VERSION, Ask


def result_receive(*, session_id: uuid.UUID, headers: Mapping[str, str], body: bytes) -> bool:
    """Take a session's result; whether it is new. Names of headers are lower-case.

    Raises: NotFound, BadSignature, Invalid; Conflict and Gone, see `rollout_session_report`.
    """
    session = RolloutSession.objects.select_related("environment").filter(pk=session_id).first()
    if session is None:
        raise NotFound("there is no such session")
    if not signing.verified([unseal(session.environment.sealed_secret, purpose=PURPOSE)], headers, body):
        raise BadSignature("the signature is missing, wrong or older than five minutes")
    try:
        told = msgspec.json.decode(body, type=Reported)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Invalid(f"this is no result: {error}", "result") from error
    if (told.version, told.type, told.session) != (VERSION, Ask.SESSION_RESULT.value, str(session_id)):
        raise Invalid(f"expected a {Ask.SESSION_RESULT.value} of version {VERSION} for this session", "session")
    return rollout_session_report(session_id=session_id, result=told.result)
