"""How the OpenAPI document is drawn: request and answer by method, and every problem that can be the answer."""

from __future__ import annotations

import inspect
from typing import Any

from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ResolvedComponent
from drf_spectacular.types import OpenApiTypes
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


# Names of enums that several components hold under the same field.
DOCUMENT_SETTINGS = {
    "ENUM_NAME_OVERRIDES": {
        "Consent": "controlplane.states.Consent",
        "MemberRole": "controlplane.states.MemberRole",
        "ClusterRole": "controlplane.api.serializers.fleet.ROLE_CHOICES",
        "MessageRole": "controlplane.api.serializers.rollouts.ROLE_CHOICES",
        "WorkKind": "controlplane.states.WorkKind",
        "StageKind": "controlplane.models.runs.KINDS",
        "WorkState": "controlplane.states.WorkState",
        "AttemptState": "controlplane.states.AttemptState",
        "RunState": "controlplane.states.RunState",
        "StageState": "controlplane.states.StageState",
        "StepState": "controlplane.states.StepState",
        "GroupState": "controlplane.states.GroupState",
        "RolloutState": "controlplane.states.RolloutState",
        "VersionState": "controlplane.states.VersionState",
        "TransferState": "controlplane.states.TransferState",
        "EvaluationState": "controlplane.states.EvaluationState",
        "ReplicaState": "controlplane.states.ReplicaState",
        "LoanState": "controlplane.states.LoanState",
        "DesiredSource": "controlplane.states.DesiredSource",
        "ReleaseState": "controlplane.states.ReleaseState",
        "CanaryVerdict": "controlplane.states.CanaryVerdict",
    }
}

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

    view: Any

    def _is_list_view(self, serializer: Any = None) -> bool:
        return self.method == "GET" and (hasattr(self.view, "rows") or getattr(self.view, "many", False))

    def get_override_parameters(self) -> list[Any]:
        """The view's documented query parameters, and the idempotency header of every POST.

        Where the body is a file, what else a POST says is in the address.
        """
        if self.method == "POST":
            return [*([self.view.input_serializer] if self._takes_file() else []), _IDEMPOTENCY]
        return list(getattr(self.view, "documented", ())) if self.method == "GET" else []

    def get_request_serializer(self) -> Any:
        """What a POST sends."""
        if self.method == "POST" and self._takes_file():
            return {parser.media_type: OpenApiTypes.BINARY for parser in self.view.parser_classes}
        return getattr(self.view, "input_serializer", None) if self.method == "POST" else None

    def _takes_file(self) -> bool:
        return bool(getattr(self.view, "body_is_file", False))

    def get_response_serializers(self) -> Any:
        """What the method answers with."""
        if getattr(self.view, "answer_is_file", False):
            return {(status, "application/octet-stream"): OpenApiTypes.BINARY for status in (200, 206)}
        if self.method == "DELETE":
            return {204: None}
        if self.method == "POST":
            answer = getattr(self.view, "answer_serializer", None) or self.view.get_serializer_class()
            default = (getattr(self.view, "success_status", 200),)
            return dict.fromkeys(getattr(self.view, "success_statuses", default), answer)
        return self.view.get_serializer_class()

    def get_operation(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """The operation with its problems."""
        operation: dict[str, Any] | None = super().get_operation(*args, **kwargs)
        if operation is None:
            return None
        problem = self._problem()
        statuses = ALWAYS | WITH_BODY if self.method in ("POST", "DELETE") else ALWAYS
        for status in sorted(statuses | getattr(self.view, "problems", frozenset())):
            operation["responses"][str(status)] = problem.ref
        return operation

    def get_description(self) -> str:  # type: ignore[override]
        """The view's docstring: what is at the path."""
        return inspect.cleandoc(type(self.view).__doc__ or "")

    def _problem(self) -> Any:
        body = self.resolve_serializer(ProblemSerializer, "response")
        component: Any = ResolvedComponent  # untyped
        answer = component(
            name="Problem",
            type=component.RESPONSE,
            object=ProblemSerializer,
            schema={"description": "what is wrong", "content": {CONTENT_TYPE: {"schema": body.ref}}},
        )
        self.registry.register_on_missing(answer)
        return answer
