"""Versions written out as the files of Hugging Face folders."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.weights import FORMATS, PolicyVersion
from rl_core.types import WeightFormat


class Export(Entity):
    """A version as the files of a model folder, in one format, kept in the object store until it is deleted.

    There is one of a version and a format at a time. Until `written_at` its unit of work says how it goes.
    """

    version = models.ForeignKey(PolicyVersion, on_delete=models.CASCADE, related_name="exports")
    format = models.CharField(max_length=16, choices=FORMATS, default=WeightFormat.BF16.value)
    bytes = models.BigIntegerField(null=True)
    written_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["version", "format"], condition=models.Q(deleted_at__isnull=True), name="export_once"
            )
        ]

    def __str__(self) -> str:
        return f"{self.version_id} in {self.format}"


class ExportFile(Entity):
    """A file of an export. `sha256` is over the whole file."""

    export = models.ForeignKey(Export, on_delete=models.CASCADE, related_name="files")
    name = models.CharField(max_length=255)
    bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["export", "name"], name="export_file_once")]

    def __str__(self) -> str:
        return self.name


class ExportPart(Entity):
    """A piece of a file, one blob of the store; a file is its parts in the order of `position`, end to end."""

    file = models.ForeignKey(ExportFile, on_delete=models.CASCADE, related_name="parts")
    position = models.PositiveIntegerField()
    blob_key = models.CharField(max_length=300, db_index=True)
    bytes = models.PositiveIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["file", "position"], name="export_part_once")]

    def __str__(self) -> str:
        return f"{self.file_id}#{self.position}"
