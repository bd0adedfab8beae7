"""What the reference server keeps of worlds: open ones by handle, each with its steps and its lease."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.environments.remote.protocol import MAX_TEXT_CHARS, VERSION, Json, Refusal, Refused

MAX_STEPS = 10_000


class CustomerWorld(Protocol):
    """What a customer writes. `state` is whatever `open` returned; calls of one session never overlap.

    A `system` text, where there is one, begins every session.
    """

    @property
    def tools(self) -> list[Json]:
        """Each `{"name", "description", "parameters": JSON schema}`."""
        ...

    @property
    def example(self) -> Json:
        """`{"task": {...}, "calls": [{"tool", "arguments"}]}`: what conformance tries."""
        ...

    def open(self, task: Json) -> Any:
        """The state in which a session begins."""
        ...

    def call(self, state: Any, tool: str, arguments: Json) -> Json:
        """`{"text": str, "ok": bool}`, and maybe `solved` and `artifacts`. A mistake of the policy has `ok` false."""
        ...

    def export(self, state: Any) -> dict[str, str]:
        """What graders may see."""
        ...

    def close(self, state: Any) -> None:
        """Let go of what the session held."""
        ...


@dataclass(slots=True)
class _Open:
    """A session. `answers` has what each step was answered, with the digest of what was asked.

    Whoever opens it holds its `lock`; who finds `opened` false after that is too late: it did not open.
    """

    handle: str
    state: Any
    task: str
    touched_s: float
    opened: bool = False
    closed: bool = False
    answers: list[tuple[str, Json]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Worlds:
    """Sessions of one world. Everything is in memory: a server that is started again answers 404."""

    def __init__(
        self,
        world: CustomerWorld,
        *,
        lease_s: float = 900.0,
        max_open: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world = world
        self._lease_s = lease_s
        self._max_open = max_open
        self._clock = clock
        self._lock = threading.Lock()
        self._by_key: dict[str, _Open] = {}
        self._by_handle: dict[str, _Open] = {}

    def open(self, message: Json) -> Json:
        """Open a session under a key; the same key and task again are the same session."""
        key, task = text_of(message, "key"), object_of(message, "task")
        digest = digest_of(task)
        with self._lock:
            self._end_leases()
            present = self._by_key.get(key)
            if present is None:
                if sum(not one.closed for one in self._by_key.values()) >= self._max_open:
                    raise Refused(Refusal.BUSY, "every world is taken; ask again", retry_after_s=1.0)
                present = _Open(uuid.uuid4().hex, None, digest, self._clock())
                present.lock.acquire()
                self._by_key[key] = self._by_handle[present.handle] = present
                opening = True
            elif present.task != digest:
                raise Refused(Refusal.SESSION_CONFLICT, "this key opened a world for another task")
            else:
                opening = False
        if opening:
            self._open(present, key, task)
        with present.lock:
            if not present.opened:
                raise Refused(Refusal.BUSY, "this world did not open; ask again", retry_after_s=1.0)
            self._check_open(present)
            return {"handle": present.handle, "lease_s": self._lease_s, "next": len(present.answers)}

    def _open(self, session: _Open, key: str, task: Json) -> None:
        """Open it, under its own lock alone; where that fails, there is none."""
        try:
            session.state = self._world.open(task)
            session.opened, session.touched_s = True, self._clock()
        finally:
            if not session.opened:
                with self._lock:
                    del self._by_key[key], self._by_handle[session.handle]
            session.lock.release()

    def call(self, message: Json) -> Json:
        """Act once for each number: a repeat gets the same answer, anything out of order is refused."""
        session, number = self._live(message), message.get("number")
        tool, arguments = text_of(message, "tool"), object_of(message, "arguments")
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise Refused(Refusal.MALFORMED, "number must be 0 or more")
        digest = digest_of([tool, arguments])
        with session.lock:
            self._check_open(session)
            if number < len(session.answers):
                before, answer = session.answers[number]
                if before != digest:
                    raise Refused(Refusal.STEP_CONFLICT, f"step {number} was another call")
                return answer
            if number > len(session.answers) or number >= MAX_STEPS:
                expected = len(session.answers)
                raise Refused(Refusal.STEP_OUT_OF_ORDER, f"step {expected} comes next", expected=expected)
            answer = self._act(session, tool, arguments)
            session.answers.append((digest, answer))
        return answer

    def export(self, message: Json) -> Json:
        """What graders may see, as data."""
        session = self._live(message)
        with session.lock:
            self._check_open(session)
            artifacts = self._world.export(session.state)
        return {"artifacts": {str(name): str(text)[:MAX_TEXT_CHARS] for name, text in artifacts.items()}}

    def close(self, message: Json) -> Json:
        """Let go of a session; closing it again changes nothing."""
        session = self._known(message)
        with session.lock:
            self._let_go(session)
        return {"closed": True}

    def _act(self, session: _Open, tool: str, arguments: Json) -> Json:
        known = {entry["name"] for entry in self._world.tools}
        if tool not in known:  # the policy's mistake, not the protocol's
            return {"text": f"Error: there is no tool named {tool[:40]!r}", "ok": False}
        told = self._world.call(session.state, tool, arguments)
        answer = {**told, "text": str(told["text"])[:MAX_TEXT_CHARS], "ok": bool(told["ok"])}
        json.dumps(answer)  # what cannot be sent must not count as done
        return answer

    def _known(self, message: Json) -> _Open:
        with self._lock:
            self._end_leases()
            session = self._by_handle.get(text_of(message, "handle"))
        if session is None:
            raise Refused(Refusal.UNKNOWN, "there is no such handle here")
        return session

    def _live(self, message: Json) -> _Open:
        session = self._known(message)
        self._check_open(session)
        session.touched_s = self._clock()
        return session

    def _check_open(self, session: _Open) -> None:
        if session.closed:
            raise Refused(Refusal.ENDED, "this world was closed, or its lease is over")

    def _end_leases(self) -> None:
        """Let go of sessions that nobody asked for as long as a lease lasts, and forget those of two leases ago."""
        now = self._clock()
        for key, session in list(self._by_key.items()):
            idle_s = now - session.touched_s
            if idle_s > self._lease_s and session.lock.acquire(blocking=False):
                try:
                    self._let_go(session)
                except Exception:  # noqa: BLE001  # the customer's code: not the fault of whoever asks now
                    traceback.print_exc()
                finally:
                    session.lock.release()
            if session.closed and idle_s > 2 * self._lease_s:
                del self._by_key[key], self._by_handle[session.handle]

    def _let_go(self, session: _Open) -> None:
        if not session.closed:
            session.closed = True
            self._world.close(session.state)
            session.state = None

    def description(self) -> Json:
        """What `describe` says of it."""
        world = self._world
        system = str(getattr(world, "system", ""))
        return {"version": VERSION, "kind": "world", "system": system, "tools": world.tools, "example": world.example}


def text_of(message: Json, name: str) -> str:
    """A text of a message. Raises: Refused."""
    value = message.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= 300:
        raise Refused(Refusal.MALFORMED, f"{name} must be a text of 1 to 300 characters")
    return value


def object_of(message: Json, name: str) -> Json:
    """An object of a message. Raises: Refused."""
    value = message.get(name)
    if not isinstance(value, dict):
        raise Refused(Refusal.MALFORMED, f"{name} must be an object")
    return value


def digest_of(value: Any) -> str:
    """What tells equal JSON from other."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
