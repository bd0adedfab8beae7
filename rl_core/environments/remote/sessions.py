"""What the reference server keeps of environments: sessions that run in threads, and their results."""

from __future__ import annotations

import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rl_core.environments.remote.protocol import VERSION, Ask, Json, Refusal, Refused, SessionState
from rl_core.environments.remote.worlds import digest_of, object_of, text_of

REPORT_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Model:
    """The policy's endpoint: give `base_url` and `api_key` to any OpenAI client. The key is this session's alone."""

    base_url: str
    api_key: str = field(repr=False)
    name: str


@dataclass(slots=True)
class Session:
    """One attempt at a task. `cancelled` is set when nobody wants its result any more: stop soon."""

    id: str
    task: Json
    model: Model
    limits: Json
    deadline_s: float
    callback: str
    asked: str = field(repr=False, default="")
    state: SessionState = SessionState.RUNNING
    result: Json | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


@runtime_checkable
class CustomerEnvironment(Protocol):
    """What a customer writes."""

    @property
    def example(self) -> Json:
        """`{"task": {...}}`: what conformance tries."""
        ...

    def run(self, session: Session) -> Json:
        """Play the session; what came of it.

        `{"reward": 0 to 1}` or `{"scores": {name: 0 to 1}}`, with `ending` `terminated` or `truncated`; or
        `{"error": {"fault": "environment" or "infrastructure", "message": ...}}`. What it raises is such an error.
        """
        ...


Send = Callable[[str, Json], int]


class Sessions:
    """Sessions of one environment, in memory: a server that is started again answers 404."""

    def __init__(
        self, environment: CustomerEnvironment, *, send: Send, max_running: int = 64, keep_s: float = 3600.0
    ) -> None:
        self._environment = environment
        self._send = send
        self._max_running = max_running
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[Session, float]] = {}

    def start(self, message: Json) -> Json:
        """Begin a session; the same again is the same session, and is not played twice."""
        session, now = _parse(message), time.monotonic()
        with self._lock:
            self._age(now)
            present = self._sessions.get(session.id)
            if present is not None:
                if present[0].asked != session.asked:
                    raise Refused(Refusal.SESSION_CONFLICT, "this id is another task's session")
                return _told(present[0])
            running = sum(one.state is SessionState.RUNNING for one, _ in self._sessions.values())
            if running >= self._max_running:
                raise Refused(Refusal.BUSY, "as many sessions run as may; ask again", retry_after_s=1.0)
            self._sessions[session.id] = session, now
        threading.Thread(target=self._play, args=(session,), name=f"session-{session.id}", daemon=True).start()
        return _told(session)

    def status(self, message: Json) -> Json:
        """Where a session stands, with its result once there is one."""
        return _told(self._known(message))

    def cancel(self, message: Json) -> Json:
        """Nobody wants its result any more. One that has ended stays ended."""
        session = self._known(message)
        with self._lock:
            if session.state is SessionState.RUNNING:
                session.state = SessionState.CANCELLED
        session.cancelled.set()
        return _told(session)

    def description(self) -> Json:
        """What `describe` says of it."""
        return {"version": VERSION, "kind": "environment", "example": self._environment.example}

    def _age(self, now: float) -> None:
        """Cancel sessions past their deadline: what hangs takes no place. Forget those that ended long ago."""
        for key, (session, begun_s) in list(self._sessions.items()):
            age_s = now - begun_s
            if session.state is SessionState.RUNNING and age_s > session.deadline_s:
                session.state = SessionState.CANCELLED
                session.cancelled.set()
            elif session.state is not SessionState.RUNNING and age_s > max(self._keep_s, session.deadline_s):
                del self._sessions[key]

    def _known(self, message: Json) -> Session:
        with self._lock:
            self._age(time.monotonic())
            found = self._sessions.get(text_of(message, "session"))
        if found is None:
            raise Refused(Refusal.UNKNOWN, "there is no such session here")
        return found[0]

    def _play(self, session: Session) -> None:
        try:
            result = dict(self._environment.run(session))
        except Exception as error:  # noqa: BLE001  # the customer's code: whatever it raises is its fault
            traceback.print_exc()
            result = {"error": {"fault": "environment", "message": f"{type(error).__name__}: {error}"[:500]}}
        with self._lock:
            if session.state is not SessionState.RUNNING:
                return
            session.result, session.state = result, SessionState.ENDED
        self._report(session, result)

    def _report(self, session: Session, result: Json) -> None:
        """Post the result; whoever does not take it can still ask for it."""
        message = {"version": VERSION, "type": Ask.SESSION_RESULT.value, "session": session.id, "result": result}
        for pause_s in REPORT_PAUSES_S:
            try:
                status = self._send(session.callback, message)
            except (OSError, urllib.error.URLError):
                status = 0
            if 200 <= status < 300 or 400 <= status < 500:
                return
            if session.cancelled.wait(pause_s):
                return


def _parse(message: Json) -> Session:
    model, limits = object_of(message, "model"), object_of(message, "limits")
    deadline_s, callback = message.get("deadline_s"), text_of(message, "callback")
    if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool) or deadline_s <= 0:
        raise Refused(Refusal.MALFORMED, "deadline_s must be positive")
    return Session(
        id=text_of(message, "session"),
        task=object_of(message, "task"),
        model=Model(text_of(model, "base_url"), text_of(model, "api_key"), text_of(model, "name")),
        limits=limits,
        deadline_s=float(deadline_s),
        callback=callback,
        asked=digest_of(message["task"]),
    )


def _told(session: Session) -> Json:
    told: Json = {"session": session.id, "state": session.state.value}
    return {**told, "result": session.result} if session.result is not None else told
