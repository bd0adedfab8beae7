"""Exports of versions."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from rest_framework import serializers

from controlplane.api.serializers.base import RequiredReasonInput, VersionBrief
from controlplane.models import Export, ExportFile
from controlplane.models.weights import FORMATS
from controlplane.states import ExportState
from rl_core.types import WeightFormat


class ExportInput(RequiredReasonInput):
    """Which version, in which format."""

    version = serializers.UUIDField()
    format = serializers.ChoiceField(choices=FORMATS, default=WeightFormat.BF16.value)


class ExportFileSerializer(serializers.ModelSerializer[ExportFile]):
    """A file of the folder. It is downloaded from `exports/{id}/files/{name}`."""

    class Meta:
        model = ExportFile
        fields = ["name", "bytes", "sha256"]
        read_only_fields = fields


class ExportSerializer(serializers.ModelSerializer[Export]):
    """A version as the files of a Hugging Face folder."""

    version = VersionBrief(read_only=True)
    state = serializers.ChoiceField(choices=ExportState.choices, read_only=True)
    error = serializers.CharField(read_only=True, help_text="what went wrong last, while it is not ready")
    files = ExportFileSerializer(many=True, read_only=True)
    expires_at = serializers.SerializerMethodField(help_text="when its files go; null: when somebody deletes them")

    class Meta:
        model = Export
        fields = [
            "id",
            "version",
            "format",
            "state",
            "error",
            "bytes",
            "files",
            "created_at",
            "written_at",
            "expires_at",
            "deleted_at",
        ]
        read_only_fields = fields

    def get_expires_at(self, export: Export) -> datetime | None:
        """Counted from when they were written."""
        if export.written_at is None or not settings.EXPORT_DAYS:
            return None
        return export.written_at + timedelta(days=settings.EXPORT_DAYS)
