"""Signatures, checked against the library of the standard's authors."""

from datetime import UTC, datetime

import pytest
from standardwebhooks.webhooks import Webhook

from rl_core import signing

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
OTHER = "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA="
BODY = b'{"a": 1}'


def test_what_we_sign_the_reference_library_verifies():
    headers = signing.sign(SECRET, BODY)
    assert Webhook(SECRET).verify(BODY, headers) == {"a": 1}


def test_what_the_reference_library_signs_we_verify():
    now = datetime.now(UTC)
    signature = Webhook(SECRET).sign("msg_1", now, BODY.decode())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": f"v1,AAAA {signature}",
    }
    assert signing.verified([OTHER, SECRET], headers, BODY)
    assert not signing.verified([OTHER], headers, BODY)
    assert not signing.verified([SECRET], headers, BODY + b" ")
    assert not signing.verified([SECRET], {**headers, "webhook-id": "msg_2"}, BODY)


@pytest.mark.parametrize(("age_s", "good"), [(0, True), (299, True), (-299, True), (301, False), (-301, False)])
def test_a_signature_is_good_for_five_minutes(age_s, good):
    headers = signing.sign(SECRET, BODY, now_s=1_000_000)
    assert signing.verified([SECRET], headers, BODY, now_s=1_000_000 + age_s) is good


@pytest.mark.parametrize("timestamp", ["", "x", "-1", "٣", "1" * 13])
def test_a_timestamp_that_is_no_number_is_refused(timestamp):
    headers = {**signing.sign(SECRET, BODY), "webhook-timestamp": timestamp}
    assert not signing.verified([SECRET], headers, BODY)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_###", "whsec_YWJj"])
def test_a_secret_that_is_none_is_refused(secret):
    with pytest.raises(ValueError, match="secret"):
        signing.sign(secret, BODY)
