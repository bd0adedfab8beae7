"""The population's requests and feedback, by the doors that any product has: OpenAI's client and signed webhooks.

A crowd's visits run in a thread of their own, so that whoever follows the lane can look at the database meanwhile. It
asks only as many questions as it is told to: on two cores, asking and training at once would slow both.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import secrets
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime

import httpx
import openai
from standardwebhooks import Webhook

from controlplane.processes.errors import DemoFault
from controlplane.processes.lane_demo.judgement import read, satisfied
from controlplane.processes.lane_demo.population import Person, Reaction, Temper, react
from rl_core.environments.short_replies import MAX_TOKENS

AT_ONCE = 12
TRIES = 8
PAUSE_S = 1.0
TIMEOUT_S = 120.0
VISITS_A_SESSION = 5
_TRY_AGAIN = {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Where the population speaks to the lane, and what lets it in."""

    url: str
    lane: str
    gateway_key: str
    source: str
    source_secret: str


@dataclass(slots=True)
class Tally:
    """What the population did, and how its feedback was received."""

    replies: int = 0
    silent: int = 0
    slips: int = 0
    # Replies of each version to honest people, and how many truly satisfied them: what no signal says outright.
    read: Counter[str] = field(default_factory=Counter)
    satisfying: Counter[str] = field(default_factory=Counter)
    # HTTP statuses of feedback, by how its sender meant it.
    statuses: dict[Temper, Counter[int]] = field(default_factory=lambda: {temper: Counter() for temper in Temper})

    def sent(self, temper: Temper) -> int:
        """Events sent by people of that temper."""
        return self.statuses[temper].total()

    def accepted(self, temper: Temper) -> int:
        """Those of them that were stored."""
        return sum(count for status, count in self.statuses[temper].items() if status < 300)


class Crowd:
    """People who ask and react, within a `with` block."""

    def __init__(self, *, doors: Doors, people: Sequence[Person], questions: Sequence[str], seed: int) -> None:
        self.tally = Tally()
        self._doors = doors
        self._people = people
        self._questions = questions
        self._seed = seed
        self._draw = random.Random(f"traffic/{seed}")
        self._numbers: Counter[str] = Counter()
        self._session = secrets.token_hex(4)
        self._visits: list[Future[None]] = []
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._signed = Webhook(doors.source_secret)
        self._forged = Webhook("whsec_" + base64.b64encode(secrets.token_bytes(32)).decode())
        self._model = openai.AsyncOpenAI(
            base_url=f"{doors.url}/v1", api_key=doors.gateway_key, timeout=TIMEOUT_S, max_retries=TRIES
        )
        self._hooks = httpx.AsyncClient(base_url=doors.url, timeout=TIMEOUT_S)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="crowd", daemon=True)

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for visit in self._visits:
            visit.cancel()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(self, count: int) -> None:
        """So many more questions, each of a person drawn at random."""
        for _ in range(count):
            person, question = self._draw.choice(self._people), self._draw.choice(self._questions)
            self._numbers[person.key] += 1
            visit = self._visit(person, question, self._numbers[person.key])
            self._visits.append(asyncio.run_coroutine_threadsafe(visit, self._loop))

    @property
    def under_way(self) -> int:
        """How many visits are not over: the question is still to be answered, or the reaction still to be sent.

        Raises: DemoFault.
        """
        for visit in self._visits:
            if visit.done() and (error := visit.exception()) is not None:
                raise DemoFault(f"the population can go on no more: {type(error).__name__}: {error}") from error
        self._visits = [visit for visit in self._visits if not visit.done()]
        return len(self._visits)

    async def _close(self) -> None:
        await self._model.close()
        await self._hooks.aclose()

    async def _visit(self, person: Person, question: str, number: int) -> None:
        async with self._gate:
            answer = await self._model.chat.completions.create(
                model=self._doors.lane,
                messages=[{"role": "user", "content": question}],
                max_tokens=MAX_TOKENS,
                temperature=1.0,
                extra_headers={
                    "X-Slipway-User": person.key,
                    "X-Slipway-Session": f"{self._session}-{person.key}-{number // VISITS_A_SESSION}",
                    "X-Slipway-Consent": "train",
                },
            )
        text = answer.choices[0].message.content or ""
        self._count(person, answer.system_fingerprint or "", text)
        reactions = react(person, text, seed=self._seed, number=number)
        self.tally.silent += not reactions
        for reaction in reactions:
            await asyncio.sleep(reaction.delay_s if reaction is reactions[0] else 0)
            await self._send(person, answer.id, reaction)

    def _count(self, person: Person, version: str, text: str) -> None:
        self.tally.replies += 1
        if person.temper is Temper.HONEST:
            self.tally.read[version] += 1
            self.tally.satisfying[version] += satisfied(person.persona, read(text))

    async def _send(self, person: Person, generation: str, reaction: Reaction) -> None:
        """One event, tried again as an honest product would when it is told to come later."""
        body = json.dumps(_event(person, generation, reaction))
        message = f"msg_{uuid.uuid4().hex}"
        for _ in range(TRIES if person.temper is Temper.HONEST else 1):
            now = datetime.now(UTC)
            webhook = self._forged if reaction.forged else self._signed
            headers = {
                "content-type": "application/json",
                "webhook-id": message,
                "webhook-timestamp": str(int(now.timestamp())),
                "webhook-signature": webhook.sign(msg_id=message, timestamp=now, data=body),
            }
            response = await self._hooks.post(f"/hooks/v1/{self._doors.source}", content=body, headers=headers)
            if response.status_code not in _TRY_AGAIN:
                break
            await asyncio.sleep(PAUSE_S)
        self.tally.statuses[person.temper][response.status_code] += 1
        self.tally.slips += reaction.slip
        if response.is_error and person.temper is Temper.HONEST:
            raise DemoFault(f"honest feedback was refused: {response.status_code} {response.text[:200]}")


def _event(person: Person, generation: str, reaction: Reaction) -> dict[str, object]:
    """The body of one feedback event."""
    return {
        "event_id": str(uuid.uuid4()),
        "signal": reaction.signal,
        "target": {"kind": "generation", "id": generation},
        "value": reaction.value,
        "occurred_at": datetime.now(UTC).isoformat(),
        "actor": {"hash": hashlib.sha256(person.key.encode()).hexdigest()[:32], "kind": "user"},
        "consent": "train",
    }
