"""What a replica's peers may take from it: verified segments, over the inference listener."""

from __future__ import annotations

import asyncio
import re
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from rl_core.delta.peers import Wanted
from rl_core.delta.spool import Spool
from rl_core.engines.http import error_response
from rl_core.engines.sharing import SegmentSharing

SEGMENTS_PATH: Final = "/v1/segments/"
_WAIT_S: Final = 2.0  # how long an answer is held back for what is on its way
_POLL_S: Final = 0.02
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_TICKET: Final = re.compile(r"[0-9a-f]{1,64}")


def segment_routes(sharing: SegmentSharing) -> list[Route]:
    """The routes that peers ask."""
    api = SegmentsApi(sharing.spool, sharing.wanted)
    return [Route(SEGMENTS_PATH + "{digest}", api.segment, methods=["GET"])]


class SegmentsApi:
    """Handler of the segments' route."""

    def __init__(self, spool: Spool, wanted: Wanted) -> None:
        self._spool = spool
        self._wanted = wanted

    async def segment(self, request: Request) -> Response:
        """`GET /v1/segments/{digest}?ticket=`: 200 with the bytes, 202 while they are on their way, else 404."""
        digest, ticket = request.path_params["digest"], request.query_params.get("ticket", "")
        if not _DIGEST.fullmatch(digest) or not _TICKET.fullmatch(ticket):
            return error_response(400, message="a segment is named by 64 hex digits, a ticket by up to 64", code=None)
        deadline = asyncio.get_running_loop().time() + _WAIT_S
        while (path := self._spool.path(digest)) is None and self._wanted.coming(digest, ticket):
            if asyncio.get_running_loop().time() > deadline:
                return Response(status_code=202)
            await asyncio.sleep(_POLL_S)
        path = path or self._spool.path(digest)
        if path is None:
            return error_response(404, message="that segment is not here", code="object_missing")
        return FileResponse(path, media_type="application/octet-stream")
