"""What a lane keeps of its users' content."""

from __future__ import annotations

from rest_framework import serializers

from controlplane.api.serializers.cadence import LaneActionInput
from controlplane.models import Lane
from controlplane.services.redaction import MAX_EXPRESSION_CHARACTERS


class RecordingSerializer(serializers.ModelSerializer[Lane]):
    """The share of consented generations whose content is kept, and expressions whose matches never are."""

    redactions = serializers.DictField(
        child=serializers.CharField(), read_only=True, help_text="by name, in RE2's syntax"
    )

    class Meta:
        model = Lane
        fields = ["record_share", "redactions", "revision"]
        read_only_fields = fields


class RecordingInput(LaneActionInput):
    """Both are set, whatever they were."""

    record_share = serializers.FloatField(min_value=0, max_value=1)
    redactions = serializers.DictField(
        child=serializers.CharField(max_length=MAX_EXPRESSION_CHARACTERS, trim_whitespace=False)
    )
