"""The chart library, served from the installed package: nothing third-party is copied into the repository."""

from __future__ import annotations

import gzip
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe

_YEAR_S = 365 * 24 * 3600


@lru_cache(maxsize=1)
def plotly_release() -> str:
    """The installed release of plotly: part of the URL, so that it may be cached for ever."""
    return version("plotly")


def plotly_url() -> str:
    """Where pages find the chart library."""
    return reverse("plotly", args=[plotly_release()])


@lru_cache(maxsize=1)
def _bundle() -> bytes:
    # Found without importing plotly, which takes a second and is not needed here.
    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        raise Http404("plotly is not installed; run: make setup")
    return Path(spec.submodule_search_locations[0], "package_data", "plotly.min.js").read_bytes()


@lru_cache(maxsize=1)
def _bundle_gzip() -> bytes:
    return gzip.compress(_bundle(), compresslevel=5)


@require_safe
@cache_control(max_age=_YEAR_S, public=True, immutable=True)
def plotly(request: HttpRequest, release: str) -> HttpResponse:
    """Plotly's bundle, compressed once, cached by browsers for a year under its release's name."""
    if release != plotly_release():
        raise Http404("another release of plotly is installed")
    zipped = "gzip" in request.headers.get("Accept-Encoding", "")
    response = HttpResponse(_bundle_gzip() if zipped else _bundle(), content_type="text/javascript; charset=utf-8")
    if zipped:
        response["Content-Encoding"] = "gzip"
    response["Vary"] = "Accept-Encoding"
    return response
