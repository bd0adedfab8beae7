"""`Idempotency-Key`: the same POST again gives the first answer, and changes nothing again.

The effect and the stored answer commit in one transaction, so a crash leaves both or neither. While one caller is
inside, a second with the same key is told 409. An error changed nothing and is not stored: the next try runs anew.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from django.db import transaction
from django.db.models.functions import Now
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.encoders import JSONEncoder

from controlplane.errors import Conflict, Invalid
from controlplane.models import IdempotencyRecord, Project
from controlplane.services.idempotency import KEPT
from controlplane.services.locks import call_try_lock

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotency-Replayed"
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


class KeyInFlight(Conflict):
    """Another call under the same key has not ended."""

    code = "idempotency_in_flight"


class KeyReused(Invalid):
    """The key was used for another request."""

    code = "idempotency_key_reused"


def answer_once(
    *,
    request: Request,
    identity: str,
    project: Project | None,
    perform: Callable[[], tuple[Response, Project | None]],
    secret_fields: frozenset[str] = frozenset(),
) -> Response:
    """Run `perform` in a transaction, at most once per key in 24 hours.

    `perform` returns the answer and the project under which to keep it. `secret_fields` of the answer are kept as
    null: what is shown once is not shown by a replay either.

    Raises: KeyInFlight, KeyReused, Invalid for a malformed key.
    """
    key = request.headers.get(HEADER)
    if key is None:
        with transaction.atomic():
            return perform()[0]
    if not _KEY.fullmatch(key):
        raise Invalid(f"{HEADER} must be 1 to 200 visible ASCII characters", HEADER)
    request_hash = _request_hash(request)
    with transaction.atomic():
        _lock(f"{project.pk if project else ''}|{identity}|{key}")
        same = IdempotencyRecord.objects.filter(actor=identity, key=key)
        if project is not None:
            same = same.filter(project=project)
        same.filter(created_at__lt=Now() - KEPT).delete()
        record = same.first()
        if record is not None:
            return _replay(record, request_hash)
        response, owner = perform()
        kept_under = owner or project
        assert kept_under is not None, "a view outside any project says under which to keep its answers"
        IdempotencyRecord.objects.create(
            project=kept_under,
            actor=identity,
            key=key,
            request_hash=request_hash,
            status=response.status_code,
            response=_stored(response.data, secret_fields),
        )
    return response


def _lock(name: str) -> None:
    """Hold the name until the transaction ends, or say that another does."""
    if not call_try_lock(name):
        raise KeyInFlight("a call with this Idempotency-Key is still running; try again in a moment", HEADER)


def _replay(record: IdempotencyRecord, request_hash: str) -> Response:
    if record.request_hash != request_hash:
        raise KeyReused("this Idempotency-Key was used for another request; take a new one", HEADER)
    return Response(record.response, status=record.status, headers={REPLAYED_HEADER: "true"})


def _request_hash(request: Request) -> str:
    data: Any = request.data
    text = hashlib.sha256(data).hexdigest() if isinstance(data, bytes) else None
    body = text or json.dumps(data, sort_keys=True, separators=(",", ":"))
    path = request.get_full_path() if text else request.path
    return hashlib.sha256(f"{request.method}\n{path}\n{body}".encode()).hexdigest()


def _stored(data: Any, secret_fields: frozenset[str]) -> Any:
    """The answer as plain JSON data, without what is shown once."""
    plain = json.loads(json.dumps(data, cls=JSONEncoder))
    if isinstance(plain, dict):
        plain.update({name: None for name in secret_fields if name in plain})
    return plain
