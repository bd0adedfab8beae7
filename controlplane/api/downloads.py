"""A file of the object store as an answer: streamed a part at a time, resumable by a byte range."""

from __future__ import annotations

import re
from http import HTTPStatus

import structlog
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from django.utils.http import content_disposition_header

from controlplane.errors import RangeRefused
from controlplane.models import ExportFile
from controlplane.selectors.exports import parts_of, pieces
from controlplane.services.events import Actor

log = structlog.get_logger(__name__)

_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))")


def file_response(request: HttpRequest, file: ExportFile, *, actor: Actor) -> HttpResponseBase:
    """The file, or the one range of it that is asked for; who took it is logged.

    Raises: RangeRefused for a range that lies outside.
    """
    start, end = _range(request, file)
    log.info(
        "export_downloaded",
        version=str(file.export.version.ref),
        file=file.name,
        actor=actor.name,
        method=request.method,
        start=start,
        end=end,
    )
    sent = start if request.method == "HEAD" else end
    response = StreamingHttpResponse(
        pieces(parts_of(file), start=start, end=sent), content_type="application/octet-stream"
    )
    response["Content-Length"] = str(end - start)
    response["Content-Disposition"] = content_disposition_header(True, file.name) or "attachment"
    response["Accept-Ranges"] = "bytes"
    response["ETag"] = _etag(file)
    response["Cache-Control"] = "private, no-store"
    if (start, end) != (0, file.bytes):
        response.status_code = HTTPStatus.PARTIAL_CONTENT
        response["Content-Range"] = f"bytes {start}-{end - 1}/{file.bytes}"
    return response


def _etag(file: ExportFile) -> str:
    return f'"{file.sha256}"'


def _range(request: HttpRequest, file: ExportFile) -> tuple[int, int]:
    """First byte and the one after the last. Of another file's range, or what is no single range, nothing is heeded."""
    found = _RANGE.fullmatch(request.headers.get("Range", ""))
    if found is None or request.headers.get("If-Range", _etag(file)) != _etag(file):
        return 0, file.bytes
    if found[1]:
        start, end = int(found[1]), min(int(found[2]) + 1 if found[2] else file.bytes, file.bytes)
    else:
        start, end = max(0, file.bytes - int(found[3])), file.bytes
    if start >= end:
        raise RangeRefused(f"the file has {file.bytes} bytes: the range lies outside; begin without Range")
    return start, end
