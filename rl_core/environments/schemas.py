"""JSON against a schema that somebody else wrote: a check has bounded costs, and reads nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from rl_core.environments.patterns import compile_pattern
from rl_core.errors import EnvironmentFault, SpecError

MAX_STEPS = 50_000
MATCH_S = 1.0  # for all patterns of a check together

Keyword = Callable[[Any, Any, Any, Any], Any]


@dataclass(slots=True)
class _Left:
    """What a check may still take."""

    steps: int = MAX_STEPS
    match_s: float = MATCH_S


_left: ContextVar[_Left] = ContextVar("left")


def check_schema(schema: dict[str, Any]) -> None:
    """Refuse what is no schema (2020-12), a pattern that does not compile, and patterns of names, which have no time
    limit. Raises: SpecError.
    """
    try:
        _check_patterns(schema)
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise SpecError(f"the schema is none: {error.message[:200]}") from error
    except RecursionError as error:
        raise SpecError("the schema is nested too deep") from error


def misfit(schema: dict[str, Any], value: Any, *, whole_integers: bool = False) -> ValidationError | None:
    """Why a JSON value does not fit a schema, or None. With `whole_integers` 1.0 is no integer, as Python has it.

    Raises: EnvironmentFault for a schema that takes too long or does not resolve.
    """
    validator = _WITH_WHOLE_INTEGERS if whole_integers else _BOUNDED
    before = _left.set(_Left())
    try:
        return best_match(validator(schema, registry=Registry()).iter_errors(value))
    except (Unresolvable, RecursionError) as cause:
        raise EnvironmentFault(f"the schema cannot be checked: {type(cause).__name__} {cause}"[:300]) from cause
    except TimeoutError as cause:
        raise EnvironmentFault("a pattern of the schema took too long; make it simpler") from cause
    finally:
        _left.reset(before)


def _counted(keyword: Keyword) -> Keyword:
    """A keyword's check that gives up after MAX_STEPS keywords."""

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        left = _left.get()
        left.steps -= 1
        if left.steps < 0:
            raise EnvironmentFault(f"the schema takes more than {MAX_STEPS} steps on a text; make it simpler")
        yield from keyword(validator, value, instance, schema) or ()

    return check


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "string"):
        return
    left, began_s = _left.get(), time.monotonic()
    found = regex.search(pattern, instance, timeout=max(left.match_s, 0.001))
    left.match_s -= time.monotonic() - began_s
    if found is None:
        yield ValidationError(f"{instance[:80]!r} does not match {pattern!r}")


def _check_patterns(schema: Any) -> None:
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key == "patternProperties":
            raise SpecError("patternProperties is not supported; name the properties, or use propertyNames")
        if key == "pattern" and isinstance(value, str):
            compile_pattern(value)
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _check_patterns(part)


def _is_whole(checker: Any, instance: Any) -> bool:
    return isinstance(instance, int) and not isinstance(instance, bool)


_BOUNDED: type[Draft202012Validator] = extend(
    Draft202012Validator,
    {name: _counted(keyword) for name, keyword in {**Draft202012Validator.VALIDATORS, "pattern": _pattern}.items()},
)
_WITH_WHOLE_INTEGERS: type[Draft202012Validator] = extend(
    _BOUNDED, type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_whole)
)
