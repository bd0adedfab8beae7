"""Users of a lane under load, by the gateway's own HTTP."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Answer:
    """What a user got."""

    user: str
    generation: uuid.UUID
    version: str

    @property
    def begun_s(self) -> float:
        """When the gateway took the request: a generation's id begins with the time (UUIDv7)."""
        return (self.generation.int >> 80) / 1e3


@dataclass
class Crowd:
    """Users who ask one question after the other, each at one of the doors, each until it is answered."""

    doors: Sequence[str]
    headers: dict[str, str]
    answers: list[Answer] = field(default_factory=list)
    turned_away: Counter[str] = field(default_factory=Counter)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _errors: list[BaseException] = field(default_factory=list)

    def begin(self, users: int) -> None:
        """Let so many users ask."""
        for number in range(users):
            thread = threading.Thread(target=self._live, args=(f"user-{number}", self.doors[number % len(self.doors)]))
            thread.start()
            self._threads.append(thread)

    def answered_since(self, since_s: float) -> int:
        """How many users got an answer to what they asked after that."""
        return len({answer.user for answer in list(self.answers) if answer.begun_s > since_s})

    def end(self) -> None:
        """Every user gets the answer that they wait for, and leaves. Raises what a user met that nobody should."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        if self._errors:
            raise self._errors[0]

    def ask_each(self, users: int) -> dict[str, str]:
        """One question of each of so many users; the version that answered them."""
        with httpx.Client(headers=self.headers, timeout=30, trust_env=False) as web:
            asked = [self._ask(web, f"user-{number}", self.doors[number % len(self.doors)]) for number in range(users)]
        return {answer.user: answer.version for answer in asked}

    def _live(self, user: str, door: str) -> None:
        try:
            with httpx.Client(headers=self.headers, timeout=30, trust_env=False) as web:
                while not self._over.is_set():
                    self.answers.append(self._ask(web, user, door))
        except BaseException as error:  # noqa: BLE001  # it is the test's
            self._errors.append(error)

    def _ask(self, web: httpx.Client, user: str, door: str) -> Answer:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                answer = self._try(web, user, door)
            except httpx.TransportError as error:  # the door is closed just now
                self.turned_away[type(error).__name__] += 1
                time.sleep(0.1)
                continue
            if answer is not None:
                return answer
        raise AssertionError(f"{user} was not answered within 60 s: {self.turned_away}")

    def _try(self, web: httpx.Client, user: str, door: str) -> Answer | None:
        body = {
            "model": "assistant",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": MAX_TOKENS,
            "stream": True,
        }
        url = f"{door}/v1/chat/completions"
        with web.stream("POST", url, json=body, headers={"X-Slipway-User": user}) as reply:
            if reply.status_code != 200:
                code = json.loads(reply.read())["error"]["code"]
                self.turned_away[f"{reply.status_code} {code}"] += 1
                time.sleep(min(0.5, float(reply.headers["Retry-After"])))
                return None
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        if events[-1] != "[DONE]":
            self.turned_away[f"broken off: {json.loads(events[-1])['error']['code']}"] += 1
            return None
        first = json.loads(events[0])
        return Answer(user, uuid.UUID(first["id"][-36:]), first["system_fingerprint"])
