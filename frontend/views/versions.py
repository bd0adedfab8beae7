"""One policy version: what it is, who holds it, why it stays; exported and downloaded as files."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.api.downloads import file_response
from controlplane.errors import ControlPlaneError, Invalid
from controlplane.models import Export, PolicyVersion
from controlplane.permissions import Action
from controlplane.selectors.exports import export_file
from controlplane.selectors.pages_version import exports_view, version_of_page, version_view
from controlplane.services.exports import export_delete, version_export
from controlplane.states import VersionState
from frontend.access import Access, access_of, page
from frontend.acts import Act, Choice, ask, require
from frontend.frame import follow, show
from frontend.looks import version_name
from rl_core.types import WeightFormat

_FORMATS: list[tuple[str, str]] = [
    (WeightFormat.BF16.value, "bf16: as trained, bit for bit"),
    (WeightFormat.FP8_CHANNEL.value, "fp8-channel: half the size, a scale for each row"),
    (WeightFormat.FP8_BLOCK.value, "fp8-block: half the size, a scale for each 128 × 128"),
    (WeightFormat.MXFP4.value, "mxfp4: about a quarter, a scale for each 32"),
    (WeightFormat.NVFP4.value, "nvfp4: about a quarter, a scale for each 16"),
]


@require_safe
@page()
def version_detail(request: HttpRequest, _access: Access, version_id: UUID) -> HttpResponse:
    """One version."""
    access, version = _version_of(request, version_id)
    live = follow(access)
    context = {"view": version_view(version), **_exports(version)}
    return show(
        request, access, "frontend/version.html", context, section="clusters", live=live, part=_EXPORTS_TEMPLATE
    )


@require_http_methods(["GET", "POST"])
@page()
def version_export_view(request: HttpRequest, _access: Access, version_id: UUID) -> HttpResponse:
    """Have a worker write the version out as files."""
    access, version = _version_of(request, version_id)
    require(access, Action.WEIGHTS_EXPORT)

    def perform(reason: str, _: int | None) -> None:
        chosen = request.POST.get("format", "")
        if chosen not in set(WeightFormat):
            raise Invalid("choose one of the formats", "format")
        version_export(version=version, weight_format=WeightFormat(chosen), actor=access.actor, reason=reason)

    act = Act(
        title=f"Export {version_name(version)}",
        explains="A worker writes the weights with config and tokenizer as a Hugging Face folder; its files are then "
        "downloaded from here. Whoever has them has the model.",
        label="Export",
        back=_address(version),
        section="clusters",
        perform=perform,
        done="The export is under way",
        choices=(Choice("format", "Format", _FORMATS, "engines read each of them; only bf16 can be trained on"),),
    )
    return ask(request, access, act)


@require_http_methods(["GET", "POST"])
@page()
def export_delete_view(request: HttpRequest, _access: Access, export_id: UUID) -> HttpResponse:
    """Let an export's files go before their time."""
    access, export = _export_of(request, export_id)
    act = Act(
        title=f"Delete the {export.format} export of {version_name(export.version)}",
        explains="Nobody can download it any more. The version itself stays, and can be exported again while it is "
        "not retired.",
        label="Delete",
        back=_address(export.version),
        section="clusters",
        perform=lambda reason, _: export_delete(export=export, actor=access.actor, reason=reason),
        done="The export is deleted",
        dangerous=True,
    )
    return ask(request, access, act)


@require_safe
@page()
def export_download(request: HttpRequest, _access: Access, export_id: UUID, name: str) -> HttpResponseBase:
    """A file of an export."""
    access, export = _export_of(request, export_id)
    file = export_file(access.project, export.pk, name)
    if file is None:
        raise Http404("there is no such file: the export is not ready, or was deleted")
    try:
        return file_response(request, file, actor=access.actor)
    except ControlPlaneError as error:
        return HttpResponse(error.message, status=error.http_status, content_type="text/plain; charset=utf-8")


_EXPORTS_TEMPLATE = "frontend/version_exports.html"


def _exports(version: PolicyVersion) -> dict[str, Any]:
    exportable = version.state == VersionState.COMMITTED and version.retired_at is None
    return {"version": version, "exports": exports_view(version), "exportable": exportable}


def _address(version: PolicyVersion) -> str:
    return reverse("version", args=[version.pk]) + "#exports-title"


def _version_of(request: HttpRequest, version_id: UUID) -> tuple[Access, PolicyVersion]:
    version = version_of_page(version_id)
    if version is None:
        raise Http404("there is no such version")
    return access_of(request, version.lineage.project_id), version


def _export_of(request: HttpRequest, export_id: UUID) -> tuple[Access, Export]:
    export = Export.objects.select_related("version__lineage").filter(pk=export_id).first()
    if export is None:
        raise Http404("there is no such export")
    access = access_of(request, export.version.lineage.project_id)
    require(access, Action.WEIGHTS_EXPORT)
    return access, export
