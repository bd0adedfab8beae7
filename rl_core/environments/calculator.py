"""The calculator tool: exact arithmetic by a parser with limits. Nothing is ever evaluated as code.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := "-" factor | "(" expression ")" | number

There is no power: `9**9**9**9` is a denial of service.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rl_core.errors import RlCoreError

MAX_CHARS = 120
MAX_DIGITS = 12
MAX_DEPTH = 10

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()]))", re.ASCII)
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


class CalculatorError(RlCoreError, ValueError):
    """An expression outside the grammar or the limits; the message is shown to the policy."""

    code = "calculator_error"


def calculate(expression: str) -> Fraction:
    """The exact value of an expression of + − × ÷, parentheses and numbers of at most 12 digits.

    Raises: CalculatorError.
    """
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"expression longer than {MAX_CHARS} characters")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS)))
    value = parser.expression(0)
    parser.expect_end()
    return value


def format_number(value: Fraction) -> str:
    """An integer as it is, anything else with up to six decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**6)
    sign = "-" if scaled < 0 else ""
    whole, decimals = divmod(abs(scaled), 10**6)
    return f"{sign}{whole}.{decimals:06d}".rstrip("0").rstrip(".")


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalculatorError(f"cannot read {text[position:].strip()[:12]!r}")
        number, symbol = match.groups()
        if number and len(number.replace(".", "")) > MAX_DIGITS:
            raise CalculatorError(f"number longer than {MAX_DIGITS} digits")
        tokens.append(number or symbol)
        position = match.end()
    if not tokens:
        raise CalculatorError("empty expression")
    return tokens


class _Parser:
    """Recursive descent over a token list, at most MAX_DEPTH deep."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token

    def expect_end(self) -> None:
        if self._peek():
            raise CalculatorError(f"unexpected {self._peek()!r}")

    def expression(self, depth: int) -> Fraction:
        value = self._term(depth)
        while self._peek() in ("+", "-"):
            value = value + self._term(depth) if self._take() == "+" else value - self._term(depth)
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self._peek() in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
                continue
            divisor = self._factor(depth)
            if divisor == 0:
                raise CalculatorError("division by zero")
            value /= divisor
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth >= MAX_DEPTH:
            raise CalculatorError(f"nested deeper than {MAX_DEPTH}")
        symbol = self._take()
        if symbol == "-":
            return -self._factor(depth + 1)
        if symbol == "(":
            value = self.expression(depth + 1)
            if self._take() != ")":
                raise CalculatorError("a parenthesis is not closed")
            return value
        if symbol[:1].isdigit():
            return Fraction(symbol)
        raise CalculatorError(f"expected a number, not {symbol!r}" if symbol else "the expression ends too early")
