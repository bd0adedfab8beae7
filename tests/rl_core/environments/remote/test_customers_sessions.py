"""Sessions of the reference server: a place for each, and none for ever."""

import time

import pytest

from rl_core.environments.remote.protocol import Refused
from rl_core.environments.remote.sessions import Sessions
from tests.rl_core.environments.remote.customers import Asker


def start(name: str, *, deadline_s: float = 60.0) -> dict:
    return {
        "session": name,
        "task": {"id": "t", "input": {"question": "q"}},
        "model": {"base_url": "http://127.0.0.1:9", "api_key": "k", "name": "policy"},
        "limits": {},
        "deadline_s": deadline_s,
        "callback": "http://127.0.0.1:9/result",
    }


@pytest.fixture
def asker():
    one = Asker()
    one.gate.clear()
    yield one
    one.gate.set()


def test_a_session_past_its_deadline_gives_its_place_up(asker):
    sessions = Sessions(asker, send=lambda url, message: 200, max_running=1)
    assert sessions.start(start("a", deadline_s=0.3))["state"] == "running"
    with pytest.raises(Refused) as caught:
        sessions.start(start("b"))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    time.sleep(0.35)
    assert sessions.status({"session": "a"})["state"] == "cancelled"
    assert sessions.start(start("b"))["state"] == "running"
    deadline = time.monotonic() + 5
    while asker.cancelled == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert asker.cancelled == 1


def test_what_ended_long_ago_is_forgotten(asker):
    asker.gate.set()
    asker.run = lambda session: {"reward": 1.0}
    sessions = Sessions(asker, send=lambda url, message: 200, keep_s=0.0)
    sessions.start(start("a", deadline_s=0.2))
    time.sleep(0.3)
    with pytest.raises(Refused) as caught:
        sessions.status({"session": "a"})
    assert caught.value.status == 404


def test_a_result_that_nobody_takes_is_sent_again(asker, monkeypatch):
    monkeypatch.setattr("rl_core.environments.remote.sessions.REPORT_PAUSES_S", (0.01, 0.01, 0.01))
    asker.run = lambda session: {"reward": 1.0}
    sent = []

    def send(url, message):
        sent.append((url, message["result"]))
        if len(sent) < 3:
            raise ConnectionRefusedError
        return 200

    sessions = Sessions(asker, send=send)
    sessions.start(start("a"))
    deadline = time.monotonic() + 5
    while len(sent) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sent == [("http://127.0.0.1:9/result", {"reward": 1.0})] * 3
    assert sessions.status({"session": "a"}) == {"session": "a", "state": "ended", "result": {"reward": 1.0}}
