"""What all serializers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers

from controlplane.models import PolicyVersion

MAX_REASON = 500


class Input(serializers.Serializer[Any]):
    """A body. Unknown keys are refused, with their name."""

    def to_internal_value(self, data: Any) -> Any:
        """Raises: ValidationError."""
        if isinstance(data, Mapping):
            unknown = sorted(set(map(str, data)) - set(self.fields))
            if unknown:
                known = ", ".join(self.fields)
                message = f"unknown field; known: {known}"
                raise serializers.ValidationError({unknown[0][:100]: [message]}, code="unknown_field")
        return super().to_internal_value(data)


class ReasonInput(Input):
    """Why a person or a program does this, for the event log."""

    reason = serializers.CharField(max_length=MAX_REASON, required=False, allow_blank=True, default="")


class RequiredReasonInput(Input):
    """Why a person or a program does this: what others have to be able to account for."""

    reason = serializers.CharField(max_length=MAX_REASON)


class JSONObjectField(serializers.JSONField):
    """A JSON object, not some other JSON value."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        """Raises: ValidationError."""
        value = super().to_internal_value(data)
        if not isinstance(value, dict):
            raise serializers.ValidationError("this must be an object", code="not_an_object")
        return value


class OptionalChoice(serializers.ChoiceField):
    """A choice that a row may not have made: shown as null, not as empty text."""

    def __init__(self, choices: Any) -> None:
        super().__init__(choices=choices, read_only=True, allow_null=True)

    def to_representation(self, value: Any) -> Any:
        """The choice, or None."""
        return super().to_representation(value) if value else None


class VersionBrief(serializers.ModelSerializer[PolicyVersion]):
    """A policy version where another row refers to it."""

    ref = serializers.CharField(read_only=True, help_text="lineage:epoch-number")

    class Meta:
        model = PolicyVersion
        fields = ["id", "ref", "epoch", "number"]
        read_only_fields = fields
