"""JSON in and out, without the traps: bounded bodies, text that PostgreSQL can hold, finite numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser
from rest_framework.renderers import JSONRenderer

from controlplane.errors import Invalid, TooLarge

MAX_DEPTH = 64
MAX_INTEGER = 2**63 - 1


class StrictJSONParser(BaseParser):
    """UTF-8 JSON. Refuses, with 400, 413 or 422, whatever would fail further in."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        """Raises: ParseError (400), TooLarge (413), Invalid (422)."""
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        body: bytes = stream.read(limit + 1)
        if len(body) > limit:
            raise TooLarge(f"the body is over the limit of {limit} bytes")
        if not body:
            return {}
        try:
            data = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"the body is not JSON: {str(error)[:200]}") from error
        for path, value in _scalars(data):
            _check(path, value)
        return data


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _scalars(data: Any) -> Iterator[tuple[str, Any]]:
    """Every key and scalar with its path, without recursion."""
    pending: list[tuple[str, int, Any]] = [("", 0, data)]
    while pending:
        path, depth, value = pending.pop()
        if depth > MAX_DEPTH:
            raise Invalid(f"the body nests deeper than {MAX_DEPTH}", path[:200])
        if isinstance(value, dict):
            for key, inner in value.items():
                yield path, key
                pending.append((f"{path}.{key}" if path else key, depth + 1, inner))
        elif isinstance(value, list):
            pending.extend((f"{path}.{index}", depth + 1, inner) for index, inner in enumerate(value))
        else:
            yield path, value


def _check(path: str, value: Any) -> None:
    field = path[:200].encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
    if isinstance(value, str):
        if "\x00" in value:
            raise Invalid("text must not hold the NUL character", field)
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise Invalid("text must not hold a lone surrogate", field)
    elif isinstance(value, float) and not math.isfinite(value):
        raise Invalid("the number is out of range", field)
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
        raise Invalid("the whole number is out of range", field)


class RawJSONParser(BaseParser):
    """The body as it came, for views that read thousands of events a second and parse each with its type."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        """The bytes; one more than the limit when there are more. Views say what is too much for them."""
        body: bytes = stream.read(settings.DATA_UPLOAD_MAX_MEMORY_SIZE + 1)
        return body


class _FileParser(BaseParser):
    """The body as it came, bounded."""

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        """The bytes. Raises: TooLarge (413)."""
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        body: bytes = stream.read(limit + 1)
        if len(body) > limit:
            raise TooLarge(f"the file is over the limit of {limit} bytes")
        return body


class JsonLinesParser(_FileParser):
    """JSON Lines."""

    media_type = "application/x-ndjson"


class ParquetParser(_FileParser):
    """A Parquet table."""

    media_type = "application/vnd.apache.parquet"


class FiniteJSONRenderer(JSONRenderer):
    """JSON in which a number that is not finite (a diverged metric) is null. Bytes are JSON already."""

    def render(
        self,
        data: Any,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, Any] | None = None,
    ) -> Any:
        """Encode; only an answer that holds such a number is walked."""
        if isinstance(data, bytes):
            return data
        try:
            return super().render(data, accepted_media_type, renderer_context)
        except ValueError:
            return super().render(_finite(data), accepted_media_type, renderer_context)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
