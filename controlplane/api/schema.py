"""How the OpenAPI document is drawn: request and answer by method, and every problem that can be the answer."""

from __future__ import annotations

from typing import Any

from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiParameter
from rest_framework import serializers

from controlplane.api.problems import CONTENT_TYPE


class ProblemSerializer(serializers.Serializer[Any]):
    """An error, after RFC 9457."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    code = serializers.CharField(help_text="stable and machine-readable")
    field = serializers.CharField(allow_blank=True, help_text="path of the offending input, or empty")
    request_id = serializers.CharField()
    detail = serializers.CharField(help_text="what is wrong and what to do next")


ALWAYS = {400, 401, 403, 404, 405, 406, 422, 503}
WITH_BODY = {409, 413, 415}

_IDEMPOTENCY = OpenApiParameter(
    name="Idempotency-Key",
    location=OpenApiParameter.HEADER,
    required=False,
    type={"type": "string", "minLength": 1, "maxLength": 200, "pattern": r"^[\x21-\x7e]+$"},
    description="the same key and body within 24 hours give the first answer again",
)


class ProblemSchema(AutoSchema):
    """AutoSchema that knows the house's views."""

    def _is_list_view(self, serializer: Any = None) -> bool:
        return self.method == "GET" and hasattr(self.view, "rows")

    def get_override_parameters(self) -> list[Any]:
        """The view's documented query parameters, and the idempotency header of every POST."""
        declared: list[Any] = list(getattr(self.view, "documented", ())) if self.method == "GET" else []
        return [*declared, _IDEMPOTENCY] if self.method == "POST" else declared

    def get_request_serializer(self) -> Any:
        """What a POST sends."""
        return getattr(self.view, "input_serializer", None) if self.method == "POST" else None

    def get_response_serializers(self) -> Any:
        """What the method answers with."""
        if self.method == "DELETE":
            return {204: None}
        if self.method == "POST":
            answer = getattr(self.view, "answer_serializer", None) or self.view.get_serializer_class()
            return {getattr(self.view, "success_status", 200): answer}
        return self.view.get_serializer_class()

    def get_operation(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """The operation with its problems."""
        operation: dict[str, Any] | None = super().get_operation(*args, **kwargs)
        if operation is None:
            return None
        component = self.resolve_serializer(ProblemSerializer, "response")
        statuses = ALWAYS | WITH_BODY if self.method in ("POST", "DELETE") else ALWAYS
        for status in sorted(statuses):
            operation["responses"][str(status)] = {
                "description": "",
                "content": {CONTENT_TYPE: {"schema": component.ref}},
            }
        return operation
