"""Rules of remote worlds: opened once, stepped in order, acted on once, closed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_core.environments.remote.conformance_common import Broken, Peer, Told, expect, fresh_id, good, require
from rl_core.environments.remote.protocol import Json


class _Try:
    """One session with the example of the server's description."""

    def __init__(self, peer: Peer) -> None:
        example = good(peer.ask("describe"))["example"]
        self.peer, self.key = peer, fresh_id()
        self.task: Json = example["task"]
        self.calls: list[Json] = example.get("calls", [])
        if not self.calls:
            raise Broken("example.calls is missing: give at least one call that works")
        self.handle = self.open()["handle"]

    def open(self) -> Json:
        return good(self.peer.ask("world.open", key=self.key, task=self.task))

    def call(self, number: int, call: Json | None = None) -> Told:
        one = call or self.calls[min(number, len(self.calls) - 1)]
        fields: dict[str, Any] = {"tool": one["tool"], "arguments": one["arguments"]}
        return self.peer.ask("world.call", handle=self.handle, number=number, step=str(number), **fields)


def opening_again_under_the_same_key_is_the_same_world(peer: Peer) -> None:
    """The first answer may have been lost."""
    session = _Try(peer)
    require(session.open()["handle"] == session.handle, "another handle was given")
    good(session.call(0))
    require(session.open().get("next") == 1, "`next` does not say which step comes next")


def a_key_of_another_task_is_refused(peer: Peer) -> None:
    """409."""
    session = _Try(peer)
    other = {**session.task, "id": "another"}
    expect(peer.ask("world.open", key=session.key, task=other), 409, "session_conflict")


def a_call_has_a_text_and_says_whether_it_worked(peer: Peer) -> None:
    """What the policy is shown."""
    told = good(_Try(peer).call(0))
    require(isinstance(told.get("text"), str) and isinstance(told.get("ok"), bool), "text or ok is missing")


def a_step_made_again_gets_the_same_answer(peer: Peer) -> None:
    """And, as the rule after the next shows, acts once."""
    session = _Try(peer)
    first = good(session.call(0))
    require(good(session.call(0)) == first, "the second answer differs")


def a_step_made_again_at_the_same_time_gets_the_same_answer(peer: Peer) -> None:
    """A repeat may overtake the first."""
    session = _Try(peer)
    with ThreadPoolExecutor(4) as threads:
        told = [good(one) for one in threads.map(lambda _: session.call(0), range(4))]
    require(all(one == told[0] for one in told), "the answers differ")
    good(session.call(1))


def a_repeat_does_not_move_the_world_on(peer: Peer) -> None:
    """After a repeat the next step is answered as it is without one."""
    plain, repeated = _Try(peer), _Try(peer)
    good(plain.call(0))
    for _ in range(3):
        good(repeated.call(0))
    require(good(plain.call(1)) == good(repeated.call(1)), "the step after a repeat is answered otherwise")


def a_number_of_another_call_is_refused(peer: Peer) -> None:
    """409: two sessions must not share a world."""
    session = _Try(peer)
    good(session.call(0))
    other = {"tool": session.calls[0]["tool"], "arguments": {"another": "call"}}
    expect(session.call(0, other), 409, "step_conflict")


def a_step_out_of_order_is_refused_with_what_is_expected(peer: Peer) -> None:
    """409 and the number."""
    session = _Try(peer)
    told = session.call(5)
    expect(told, 409, "step_out_of_order")
    require(told.body["error"].get("expected") == 0, "`expected` does not say which step comes next")


def an_unknown_tool_is_a_result(peer: Peer) -> None:
    """The policy's mistakes are shown to it."""
    told = good(_Try(peer).call(0, {"tool": "no_such_tool", "arguments": {}}))
    require(told.get("ok") is False and told.get("text"), "expected ok false and a text")


def malformed_calls_are_refused(peer: Peer) -> None:
    """400, and the world stays where it is."""
    session = _Try(peer)
    for number in (-1, "0", None, True, 0.5):
        wrong = peer.ask("world.call", handle=session.handle, number=number, step="", tool="t", arguments={})
        expect(wrong, 400, "malformed")
    good(session.call(0))


def artefacts_are_exported_as_texts(peer: Peer) -> None:
    """What graders see."""
    session = _Try(peer)
    artifacts = good(peer.ask("world.export", handle=session.handle)).get("artifacts")
    require(isinstance(artifacts, dict), "artifacts is missing")
    require(all(isinstance(text, str) for text in (artifacts or {}).values()), "artifacts must be texts")


def an_unknown_handle_is_unknown(peer: Peer) -> None:
    """404."""
    told = peer.ask("world.call", handle=fresh_id(), number=0, step="0", tool="t", arguments={})
    expect(told, 404, "unknown")


def a_closed_world_has_ended(peer: Peer) -> None:
    """Closing twice is closing once; anything else is refused with 410."""
    session = _Try(peer)
    good(peer.ask("world.close", handle=session.handle))
    good(peer.ask("world.close", handle=session.handle))
    expect(session.call(0), 410, "ended")


RULES: list[Callable[[Peer], None]] = [
    opening_again_under_the_same_key_is_the_same_world,
    a_key_of_another_task_is_refused,
    a_call_has_a_text_and_says_whether_it_worked,
    a_step_made_again_gets_the_same_answer,
    a_step_made_again_at_the_same_time_gets_the_same_answer,
    a_repeat_does_not_move_the_world_on,
    a_number_of_another_call_is_refused,
    a_step_out_of_order_is_refused_with_what_is_expected,
    an_unknown_tool_is_a_result,
    malformed_calls_are_refused,
    artefacts_are_exported_as_texts,
    an_unknown_handle_is_unknown,
    a_closed_world_has_ended,
]
