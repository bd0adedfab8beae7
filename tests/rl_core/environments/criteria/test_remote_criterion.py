"""A grader over HTTP: signed, bounded, tried again or not as its answer says."""

from __future__ import annotations

import json

import pytest
from standardwebhooks.webhooks import Webhook

from tests.rl_core.environments.criteria.grading_rig import said, scored, serving

SECRET = "whsec_" + "c2xpcHdheS1ncmFkZXItc2VjcmV0LTAx"


async def by_remote(server, secret=SECRET, trajectory=None, **params):
    params = {"url": f"{server.url}/grade", "secret": "hook", **params}
    return await scored(
        "remote", params, trajectory or said("x", artifacts={"patch": "{}"}), outside=server.outside(hook=secret)
    )


async def test_the_work_is_posted_signed_and_its_value_comes_back():
    with serving(lambda body: (200, b'{"value": 0.5, "reason": "half\\nright"}')) as server:
        score = await by_remote(server)
        assert (score.value, score.reason) == (0.5, "half right")
        await by_remote(server)
        await by_remote(server, reference=True)
    (headers, body), (again, _), (_, whole) = server.got
    message = Webhook(SECRET).verify(body, headers)
    assert message["version"] == 1
    assert message["criterion"] == "It is good"
    assert message["task"] == {"id": "t1", "split": "train", "input": {"question": "What is it?"}}
    assert message["trajectory"]["messages"][-1] == {"role": "assistant", "content": "x", "name": "", "sampled": True}
    assert message["trajectory"]["artifacts"] == {"patch": "{}"}
    assert headers["webhook-id"] == again["webhook-id"]
    assert json.loads(whole)["task"]["reference"] == {"answer": "6"}


@pytest.mark.parametrize(
    ("status", "answer", "message", "retryable"),
    [
        (200, b"1", "not {value, reason}", True),
        (200, b'{"value": 1.5}', "not {value, reason}", True),
        (200, b'{"value": -0.1}', "not {value, reason}", True),
        (200, b'{"value": NaN}', "not {value, reason}", True),
        (200, b'{"value": "1"}', "not {value, reason}", True),
        (200, b'{"reason": "?"}', "not {value, reason}", True),
        (200, b'{"value": 1, "more": 2}', "not {value, reason}", True),
        (200, b" " * 70_000 + b'{"value": 1}', "over 65536 bytes", True),
        (302, b"", "answered 302", False),
        (400, b"no", "answered 400", False),
        (401, b"no", "answered 401", False),
        (408, b"", "answered 408", True),
        (429, b"", "answered 429", True),
        (500, b"", "answered 500", True),
    ],
)
async def test_an_answer_that_is_no_value_is_an_error(status, answer, message, retryable):
    with serving(lambda body: (status, answer)) as server:
        score = await by_remote(server)
    assert (score.value, score.retryable) == (None, retryable)
    assert message in score.error


async def test_one_that_is_gone_or_whose_secret_signs_nothing():
    with serving(lambda body: (200, b'{"value": 1}')) as server:
        assert "signs nothing" in (await by_remote(server, secret="plain")).error
        assert "signs nothing" in (await by_remote(server, secret="")).error
        assert server.got == []
        outside = server.outside(hook=SECRET)
    score = await scored("remote", {"url": f"{server.url}/grade", "secret": "hook"}, said("x"), outside=outside)
    assert (score.value, score.retryable) == (None, True)
    assert "no answer" in score.error
