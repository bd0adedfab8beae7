"""The calculator: exact, bounded, and no evaluator."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.calculator import CalculatorError, calculate, format_number

numbers = st.integers(0, 10**6).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join), inner.map("({})".format), inner.map("-{}".format)
    ),
    max_leaves=6,
)


@given(expressions)
def test_agrees_with_python_on_its_own_grammar(text):
    try:
        value = calculate(text)
    except CalculatorError:
        assert len(text) > 120 or text.count("-") + text.count("(") >= 10
    else:
        assert value == eval(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("41*12", "492"),
        ("2 + 3 * (4 - 1)", "11"),
        ("7 ÷ 2", "3.5"),
        ("10 × 3 − 1", "29"),
        ("-(-5)", "5"),
        ("1/3", "0.333333"),
        ("0.1+0.2", "0.3"),
        ("-1/8", "-0.125"),
        ("8-2-1", "5"),
    ],
)
def test_values(text, shown):
    assert format_number(calculate(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["", "1+", "(1", "1)", "2**3", "9**9**9**9", "1/0", "1/(2-2)", "x", "__import__('os')", "1 2", "1234567890123",
     "(" * 11 + "1" + ")" * 11, "-" * 11 + "1", "1" + "+1" * 80, "１+１", "1e9", ".5"],
)  # fmt: skip
def test_refused(text):
    with pytest.raises(CalculatorError):
        calculate(text)


def test_the_largest_accepted_expression_is_cheap():
    started = time.perf_counter()
    value = calculate("*".join(["999999999999"] * 9))
    assert value == Fraction(999999999999) ** 9
    assert time.perf_counter() - started < 0.05
