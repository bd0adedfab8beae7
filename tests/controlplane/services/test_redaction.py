"""Redaction: matches are replaced by names, and no expression can stall the process or slip through."""

import pytest

from controlplane.errors import Invalid
from controlplane.services import redaction
from controlplane.services.redaction import RedactionFailed, Redactor, redactions_check

GOOD = {"email": r"[\w.]+@[\w.]+\w", "card": r"\b\d{4}(-\d{4}){3}\b"}


def test_matches_are_replaced_and_counted():
    redactor = Redactor(GOOD)
    assert redactor.text("é ann@example.org, 4111-1111-1111-1111; bob@example.org") == "é [email], [card]; [email]"
    assert redactor.count == 3
    assert Redactor({}).text("x@y.z") == "x@y.z"


def test_good_expressions_pass():
    redactions_check(GOOD)
    redactions_check({})


@pytest.mark.parametrize(
    ("redactions", "wrong"),
    [
        ({"x": "("}, "does not compile"),
        ({"x": r"(a)\1"}, "does not compile"),
        ({"x": "(?=a)a"}, "does not compile"),
        ({"x": "a*"}, "empty text"),
        ({"x": "a" * 1001}, "1000 characters"),
        ({"x": 3}, "redaction x"),
        ({"Not a name": "a"}, "name"),
        ({f"x{number}": "a" for number in range(51)}, "50"),
    ],
)
def test_bad_expressions_are_refused_by_name(redactions, wrong):
    with pytest.raises(Invalid, match=wrong) as caught:
        redactions_check(redactions)
    assert caught.value.field.startswith("redactions")


def test_an_expression_that_backtracking_engines_choke_on_takes_linear_time():
    """`re` would take longer than the universe is old."""
    text = "a" * 100_000 + "!"
    assert Redactor({"x": r"(a+)+$"}).text(text) == text


def test_a_name_is_no_template():
    assert Redactor({r"\1\g<0>": "b"}).text("abc") == r"a[\1\g<0>]c"


def test_what_goes_past_a_bound_fails(monkeypatch):
    with pytest.raises(RedactionFailed, match="characters"):
        Redactor(GOOD).text("a" * (redaction.MAX_TEXT_CHARACTERS + 1))
    with pytest.raises(RedactionFailed, match="does not compile"):
        Redactor({"x": "("})
    with pytest.raises(RedactionFailed, match="Unicode"):
        Redactor(GOOD).text("\ud800")
    monkeypatch.setattr(redaction, "MAX_SECONDS", -1.0)
    with pytest.raises(RedactionFailed, match="longer"):
        Redactor(GOOD).text("a")
