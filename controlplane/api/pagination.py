"""Cursor pagination over one unique, ordered column: stable while rows are added, and cheap on page 1,000."""

from __future__ import annotations

import base64
import json
import uuid
from dataclasses import dataclass
from typing import Any

from rest_framework.exceptions import ParseError
from rest_framework.pagination import BasePagination
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import Invalid

PAGE_SIZE = 50
MAX_PAGE_SIZE = 200
CURSOR_PARAM = "cursor"
SIZE_PARAM = "page_size"
_MAX_CURSOR_CHARS = 400
_MAX_POSITION = 2**63 - 1


class CursorInvalid(ParseError):
    """The cursor was not made by this endpoint."""

    default_code = "cursor_invalid"


@dataclass(frozen=True, slots=True)
class Keyset:
    """The column that orders a list. `kind` is the type of its values."""

    field: str = "id"
    kind: type[uuid.UUID] | type[int] = uuid.UUID
    descending: bool = True

    def encode(self, value: Any) -> str:
        """The cursor after a row with this value."""
        return base64.urlsafe_b64encode(json.dumps(str(value)).encode()).decode().rstrip("=")

    def decode(self, cursor: str) -> uuid.UUID | int:
        """The value in a cursor. Raises: CursorInvalid."""
        if len(cursor) > _MAX_CURSOR_CHARS:
            raise CursorInvalid("the cursor is none of this list's; start without one")
        try:
            raw = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
            value = self.kind(str(raw))
        except (ValueError, RecursionError) as error:
            raise CursorInvalid("the cursor is none of this list's; start without one") from error
        if isinstance(value, int) and abs(value) > _MAX_POSITION:
            raise CursorInvalid("the cursor is none of this list's; start without one")
        return value


class TimeCursorPagination(BasePagination):
    """`?cursor=&page_size=` → {next_cursor, results}. Newest first, unless the view's `keyset` says otherwise."""

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any]:
        """One page of the queryset. Raises: CursorInvalid, Invalid for a page size out of range."""
        keyset: Keyset = getattr(view, "keyset", Keyset())
        size = page_size(request)
        cursor = request.query_params.get(CURSOR_PARAM, "")
        if cursor:
            lookup = f"{keyset.field}__{'lt' if keyset.descending else 'gt'}"
            queryset = queryset.filter(**{lookup: keyset.decode(cursor)})
        rows = list(queryset.order_by(("-" if keyset.descending else "") + keyset.field)[: size + 1])
        more = len(rows) > size
        rows = rows[:size]
        self.next_cursor = keyset.encode(getattr(rows[-1], keyset.field)) if more else None
        return rows

    def get_paginated_response(self, data: Any) -> Response:
        """The page with the cursor of the next, null on the last."""
        return Response({"next_cursor": self.next_cursor, "results": data})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        """For the OpenAPI document."""
        return {
            "type": "object",
            "required": ["next_cursor", "results"],
            "properties": {
                "next_cursor": {"type": "string", "nullable": True},
                "results": schema,
            },
        }

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        """For the OpenAPI document."""
        size = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": PAGE_SIZE}
        return [
            {
                "name": CURSOR_PARAM,
                "in": "query",
                "required": False,
                "description": "`next_cursor` of the page before",
                "schema": {"type": "string", "maxLength": _MAX_CURSOR_CHARS},
            },
            {"name": SIZE_PARAM, "in": "query", "required": False, "schema": size},
        ]


def page_size(request: Request, *, name: str = SIZE_PARAM, default: int = PAGE_SIZE, most: int = MAX_PAGE_SIZE) -> int:
    """A bounded count from the query. Raises: Invalid."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise Invalid(f"{name} must be a whole number from 1 to {most}", name)
    return int(text)
