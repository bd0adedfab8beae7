"""Our side of a conversation with a remote server: signed requests, answers that are verified before they are read."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from rl_core import signing
from rl_core.destinations import Answer, post, trusted
from rl_core.environments.remote.messages import Described, ErrorTold
from rl_core.environments.remote.protocol import MAX_ANSWER_BYTES, VERSION, Ask, Refusal
from rl_core.errors import (
    AnswerTooLarge,
    DestinationRefused,
    DestinationUnreached,
    EnvironmentFault,
    RemoteBusy,
    RemoteDiverged,
    RemoteEnded,
    RemoteFailed,
    RemoteProtocolError,
    RemoteUnreachable,
)

ANSWER_S: Final = 60.0
PATIENCE_S: Final = 30.0
_RETRY_AFTER_CAP_S: Final = 10.0
_PASSING: Final = frozenset({429, 502, 503, 504})  # what stands between may say these too, and signs nothing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Where a remote world or environment answers, and the secret that both sides sign with."""

    url: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RemoteClient:
    """Asks one place. `answer_s` bounds every answer; `patience_s` how long a busy server is asked again."""

    place: RemotePlace
    answer_s: float = ANSWER_S
    patience_s: float = PATIENCE_S

    async def describe(self) -> Described:
        """What the server offers. Raises: see `ask`."""
        return await self.ask(Ask.DESCRIBE, Described)

    async def ask(self, ask: Ask, kind: type[T], **fields: Any) -> T:
        """One request and its answer. Every request may be made again: the other side does nothing twice.

        Raises: RemoteUnreachable, RemoteBusy, RemoteDiverged (infrastructure); RemoteProtocolError, RemoteEnded,
        RemoteFailed (the environment's).
        """
        body = json.dumps({"version": VERSION, "type": ask.value, **fields}).encode()
        give_up_s = time.monotonic() + self.patience_s
        while True:
            message_id = f"msg_{uuid.uuid4().hex}"
            answer = await self._post(body, message_id)
            if answer.status not in (429, 503):
                return self._read(answer, message_id, kind)
            pause_s = _retry_after_s(answer)
            if time.monotonic() + pause_s > give_up_s:
                raise RemoteBusy(f"{self.place.url} asks for patience (HTTP {answer.status}); try again later")
            await asyncio.sleep(pause_s)

    async def _post(self, body: bytes, message_id: str) -> Answer:
        headers = {"content-type": "application/json"}
        headers |= signing.sign(self.place.secret, body, message_id=message_id)
        try:
            destination = trusted(self.place.url)
            return await post(
                destination, body=body, headers=headers, timeout_s=self.answer_s, max_bytes=MAX_ANSWER_BYTES
            )
        except AnswerTooLarge as error:
            raise RemoteProtocolError(f"{self.place.url}: {error}") from error
        except DestinationRefused as error:
            raise RemoteProtocolError(f"{self.place.url}: {error}") from error
        except DestinationUnreached as error:
            raise RemoteUnreachable(f"{self.place.url} did not answer: {error}") from error

    def _read(self, answer: Answer, message_id: str, kind: type[T]) -> T:
        where = self.place.url
        told_id = answer.headers.get(signing.ID, "")
        if told_id != message_id or not signing.verified([self.place.secret], answer.headers, answer.body):
            if answer.status in _PASSING:
                raise RemoteUnreachable(f"{where} answered {answer.status}, unsigned: something before it did")
            raise RemoteProtocolError(f"{where} answered {answer.status} unsigned, or signed with another secret")
        try:
            message = msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RemoteProtocolError(f"{where} answered {answer.status} with what is no JSON") from error
        if not isinstance(message, dict) or message.get("version") != VERSION:
            told = message.get("version") if isinstance(message, dict) else None
            raise RemoteProtocolError(f"{where} answers in version {str(told)[:20]}, not {VERSION}")
        if answer.status != 200:
            raise self._error(answer.status, message)
        try:
            return msgspec.convert(message, kind)
        except msgspec.ValidationError as error:
            raise RemoteProtocolError(f"{where} answered what the protocol does not allow: {error}") from error

    def _error(self, status: int, message: dict[str, Any]) -> EnvironmentFault:
        try:
            told = msgspec.convert(message.get("error"), ErrorTold)
        except msgspec.ValidationError:
            return RemoteProtocolError(f"{self.place.url} answered {status} without an error")
        text = f"{self.place.url} answered {told.code[:40]}: {told.message[:200]}"
        if told.code in (Refusal.UNKNOWN, Refusal.ENDED):
            return RemoteEnded(text)
        if told.code == Refusal.FAILED:
            return RemoteFailed(text)
        if told.code in (Refusal.STEP_CONFLICT, Refusal.STEP_OUT_OF_ORDER):
            return RemoteDiverged(text)
        return RemoteProtocolError(text)


def _retry_after_s(answer: Answer) -> float:
    """What the server asked for, bounded, and a little at random so that not all come back at once."""
    try:
        wanted = float(answer.headers.get("retry-after", "1"))
    except ValueError:
        wanted = 1.0
    bounded = min(_RETRY_AFTER_CAP_S, max(0.05, wanted)) if math.isfinite(wanted) else 1.0
    return bounded * random.uniform(1.0, 1.2)
