"""Versions written out as the files of Hugging Face folders, and their download."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponseBase
from rest_framework.request import Request

from controlplane.api.base import ActionView, ApiView, DetailView, ListView, Post, one
from controlplane.api.downloads import file_response
from controlplane.api.filters import ExportFilter
from controlplane.api.serializers.base import RequiredReasonInput
from controlplane.api.serializers.exports import ExportInput, ExportSerializer
from controlplane.api.wire import FiniteJSONRenderer
from controlplane.errors import Invalid, NotFound
from controlplane.models import Export
from controlplane.permissions import Action
from controlplane.selectors import exports as select
from controlplane.selectors.api_fleet import versions_of
from controlplane.services import exports
from rl_core.types import WeightFormat


class ExportList(Post, ListView):
    """Exports of all versions. POST has a worker write one; what is written or under way already is answered with."""

    actions = {"GET": Action.READ, "POST": Action.WEIGHTS_EXPORT}
    serializer_class = ExportSerializer
    input_serializer = ExportInput
    filterset_class = ExportFilter
    success_status = 202

    def rows(self) -> QuerySet[Export]:
        """Exports."""
        return select.exports_of(self.project)

    def perform(self, data: dict[str, Any]) -> Export:
        """Ask for it."""
        version = versions_of(self.project).filter(pk=data["version"]).first()
        if version is None:
            raise Invalid("there is no such version in this project", "version")
        row = exports.version_export(
            version=version, weight_format=WeightFormat(data["format"]), actor=self.actor, reason=data["reason"]
        )
        return select.exports_of(self.project).get(pk=row.pk)


class ExportDetail(DetailView):
    """One export, with its files once they stand."""

    serializer_class = ExportSerializer

    def row(self) -> Export:
        """The export of the path."""
        export: Export = one(select.exports_of(self.project), "export", pk=self.kwargs["id"])
        return export


class ExportDelete(ActionView):
    """Let an export's files go before their time."""

    actions = {"POST": Action.WEIGHTS_EXPORT}
    serializer_class = ExportSerializer
    input_serializer = RequiredReasonInput

    def perform(self, data: dict[str, Any]) -> Export:
        """Delete it."""
        export: Export = one(select.exports_of(self.project), "export", pk=self.kwargs["id"])
        exports.export_delete(export=export, actor=self.actor, reason=data["reason"])
        return select.exports_of(self.project).get(pk=export.pk)


class ExportFileDownload(ApiView):
    """A file of an export, as it is. A download that broke off goes on with `Range: bytes=N-`."""

    actions = {"GET": Action.WEIGHTS_EXPORT}
    serializer_class = ExportSerializer
    filter_backends = ()
    pagination_class = None
    answer_is_file = True
    problems = frozenset({416})

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        """Whatever is asked for gets the file; problems are JSON."""
        return FiniteJSONRenderer(), FiniteJSONRenderer.media_type

    def get(self, request: Request, **kwargs: Any) -> HttpResponseBase:
        """The bytes."""
        file = select.export_file(self.project, kwargs["id"], kwargs["name"])
        if file is None:
            raise NotFound("there is no such file: the export is not ready, was deleted, or has no file of that name")
        return file_response(request._request, file, actor=self.actor)
