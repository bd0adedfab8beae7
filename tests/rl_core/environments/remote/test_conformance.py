"""Every rule of the conformance test: kept by the reference server, and found broken by a server that breaks it."""

import itertools
import json
import time
import uuid

import pytest

from rl_core import signing
from rl_core.environments.remote import conformance, conformance_sessions
from rl_core.environments.remote.conformance import Peer, rules_of, try_rules
from rl_core.environments.remote.protocol import Refusal, Refused
from rl_core.environments.remote.server import RemoteServer, serving
from tests.rl_core.environments.remote.customers import OTHER_SECRET, SECRET, Asker, Counter

_numbers = itertools.count()


class Broken(RemoteServer):
    """A server whose requests pass `before`, whose answers pass `after`, and which answers some refusals with good."""

    before = staticmethod(lambda headers, message: message)
    after = staticmethod(lambda message, told: told)
    forgives: dict[Refusal, dict] = {}

    def answer(self, headers, body):
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        changed = self.before(headers, message)
        if changed is not message:
            body = json.dumps(changed).encode()
            headers = signing.sign(SECRET, body)
        try:
            return self.after(changed, super().answer(headers, body))
        except Refused as refused:
            if refused.code in self.forgives:
                return self.forgives[refused.code]
            raise


def forgiving(code: Refusal, **told) -> type[Broken]:
    return type("Forgiving", (Broken,), {"forgives": {code: told}})


def asked_otherwise(kind: str, change) -> type[Broken]:
    def before(headers, message):
        if isinstance(message, dict) and message.get("type") == kind:
            return {**message, **change(message)}
        return message

    return type("AskedOtherwise", (Broken,), {"before": staticmethod(before)})


def told_otherwise(kind: str, change) -> type[Broken]:
    def after(message, told):
        return {**told, **change(told)} if message["type"] == kind else told

    return type("ToldOtherwise", (Broken,), {"after": staticmethod(after)})


class Trusting(Broken):
    """Does not look at signatures."""

    before = staticmethod(lambda headers, message: dict(message) if isinstance(message, dict) else message)


class Forgetful(Broken):
    """Does not look at the age of signatures."""

    def answer(self, headers, body):
        then = float(headers.get("webhook-timestamp", "0"))
        if signing.verified([SECRET], headers, body, now_s=then):
            headers = signing.sign(SECRET, body)
        return super().answer(headers, body)


class Unsigning(Broken):
    """Signs no answer."""

    def signed(self, answer, request_id):
        return {}


class Actor(Broken):
    """A repeat moves the world on, though it is answered as before."""

    def answer(self, headers, body):
        message = json.loads(body)
        if message.get("type") == "world.call" and message.get("number") == 0:
            handle = message.get("handle")
            session = self._does["world.call"].__self__._by_handle.get(handle)
            if session is not None and session.answers:
                session.state["total"] += 1
        return super().answer(headers, body)


class Misreporting(Broken):
    """Signs its results with another secret."""

    def send(self, url, message):
        kept, self._secret = self._secret, OTHER_SECRET
        try:
            return super().send(url, message)
        finally:
            self._secret = kept


class Generous(Asker):
    def run(self, session):
        return {**super().run(session), "reward": 2.0}


class Deaf(Broken):
    """Says that it cancelled, and goes on."""

    def answer(self, headers, body):
        message = json.loads(body)
        if message.get("type") == "session.cancel":
            return {**super().answer(*as_status(message)), "state": "cancelled"}
        return super().answer(headers, body)


def as_status(message):
    body = json.dumps({**message, "type": "session.status"}).encode()
    return signing.sign(SECRET, body), body


def unique(_):
    return {"text": str(next(_numbers))}


OK = {"text": "", "ok": True}
COMMON = {
    "it describes itself": told_otherwise("describe", lambda told: {"example": {}}),
    "unsigned requests are refused": Trusting,
    "wrong signatures are refused": Trusting,
    "old signatures are refused": Forgetful,
    "other versions are refused": asked_otherwise("describe", lambda message: {"version": 1}),
    "unknown types are refused": forgiving(Refusal.UNKNOWN_TYPE),
    "what is no message is refused": forgiving(Refusal.MALFORMED),
    "requests over a mebibyte are refused": forgiving(Refusal.TOO_LARGE),
}
WORLDS = {
    "opening again under the same key is the same world": asked_otherwise(
        "world.open", lambda message: {"key": uuid.uuid4().hex}
    ),
    "a key of another task is refused": asked_otherwise("world.open", lambda message: {"task": {"id": "t-1"}}),
    "a call has a text and says whether it worked": told_otherwise("world.call", lambda told: {"ok": "yes"}),
    "a step made again gets the same answer": told_otherwise("world.call", unique),
    "a step made again at the same time gets the same answer": told_otherwise("world.call", unique),
    "a repeat does not move the world on": Actor,
    "a number of another call is refused": forgiving(Refusal.STEP_CONFLICT, **OK),
    "a step out of order is refused with what is expected": forgiving(Refusal.STEP_OUT_OF_ORDER, **OK),
    "an unknown tool is a result": told_otherwise("world.call", lambda told: {"ok": True}),
    "malformed calls are refused": forgiving(Refusal.MALFORMED, **OK),
    "artefacts are exported as texts": told_otherwise("world.export", lambda told: {"artifacts": {"total": 3}}),
    "an unknown handle is unknown": forgiving(Refusal.UNKNOWN, **OK),
    "a closed world has ended": forgiving(Refusal.ENDED, **OK),
}
SESSIONS = {
    "a session asks the endpoint and reports": Misreporting,
    "starting again plays once": asked_otherwise("session.start", lambda message: {"session": uuid.uuid4().hex}),
    "an id of another task is refused": forgiving(Refusal.SESSION_CONFLICT, session="s", state="running"),
    "a cancelled session reports nothing": Deaf,
    "an unknown session is unknown": forgiving(Refusal.UNKNOWN, state="running"),
    "malformed sessions are refused": forgiving(Refusal.MALFORMED, state="running"),
}


def test_the_tables_have_every_rule():
    worlds = {rule.__name__.replace("_", " ") for rule in rules_of("world")}
    sessions = {rule.__name__.replace("_", " ") for rule in rules_of("environment")}
    assert worlds == COMMON.keys() | WORLDS.keys()
    assert sessions == COMMON.keys() | SESSIONS.keys()


@pytest.mark.parametrize("customer", [Counter, Asker])
def test_the_reference_server_keeps_every_rule(customer):
    with serving(RemoteServer(customer(), secret=SECRET)) as url:
        findings = list(try_rules(Peer(url, SECRET)))
    assert [finding for finding in findings if finding.wrong] == []
    assert len(findings) > 10


def broken_rule(name: str, server: type[RemoteServer], customer) -> str:
    """What the rule finds wrong, tried alone."""
    kind = "world" if isinstance(customer, Counter) else "environment"
    rule = next(rule for rule in rules_of(kind) if rule.__name__.replace("_", " ") == name)
    try_alone = pytest.MonkeyPatch()
    try_alone.setattr(conformance, "rules_of", lambda _: [rule])
    with try_alone.context(), serving(server(customer, secret=SECRET)) as url:
        (finding,) = try_rules(Peer(url, SECRET))
    try_alone.undo()
    return finding.wrong


@pytest.mark.parametrize(("name", "server"), (COMMON | WORLDS).items(), ids=COMMON | WORLDS)
def test_a_world_that_breaks_a_rule_is_found(name, server):
    assert broken_rule(name, server, Counter())


@pytest.mark.parametrize(("name", "server"), SESSIONS.items(), ids=SESSIONS)
def test_an_environment_that_breaks_a_rule_is_found(name, server, monkeypatch):
    monkeypatch.setattr(conformance_sessions, "WAIT_S", 2.0)
    assert broken_rule(name, server, Asker())


def test_answers_must_be_signed():
    assert "not signed" in broken_rule("it describes itself", Unsigning, Counter())


def test_a_reward_over_one_is_found():
    assert "not in [0, 1]" in broken_rule("a session asks the endpoint and reports", RemoteServer, Generous())


def test_the_command_says_what_is_broken(tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    with serving(RemoteServer(Counter(), secret=SECRET)) as url:
        assert conformance.main([url, "--secret-file", str(secret)]) == 0
        assert "all rules are kept" in capsys.readouterr().out
    with serving(forgiving(Refusal.ENDED, **OK)(Counter(), secret=SECRET)) as url:
        assert conformance.main([url, "--secret-file", str(secret)]) == 1
    told = capsys.readouterr().out
    assert "BROKEN  a closed world has ended: expected 410 ended, got 200" in told
    assert "1 rules are broken" in told
    begun = time.monotonic()
    assert conformance.main(["http://127.0.0.1:9/", "--secret-file", str(secret)]) == 3
    assert time.monotonic() - begun < 5
    with pytest.raises(SystemExit, match="2"):
        conformance.main(["http://127.0.0.1:9/", "--secret-file", str(tmp_path / "nothing")])
