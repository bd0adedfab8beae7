"""The OpenAPI document outside a request: for the committed copy and its test."""

from __future__ import annotations

from typing import Any

from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiYamlRenderer
from drf_spectacular.settings import patched_settings

from controlplane.api.schema import DOCUMENT_SETTINGS


def openapi_yaml() -> bytes:
    """What `/api/v1/schema` serves."""
    with patched_settings(DOCUMENT_SETTINGS):
        generator: Any = SchemaGenerator  # drf-spectacular's own code is untyped here
        renderer: Any = OpenApiYamlRenderer()
        schema = generator().get_schema(request=None, public=True)
        document: bytes = renderer.render(schema, renderer_context={})
    return document
