"""The committed OpenAPI document is the code's, and documents what can happen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from django.conf import settings

from controlplane.api.document import openapi_yaml
from tests.controlplane.api.api_factories import client_of

DOCUMENT = Path(settings.BASE_DIR) / "docs" / "openapi.yaml"


def test_the_committed_document_is_current() -> None:
    assert DOCUMENT.read_bytes() == openapi_yaml(), "run: manage.py openapi"


@pytest.mark.django_db
def test_the_served_document_is_the_same() -> None:
    served = client_of().get("/api/v1/schema", headers={"Accept": "application/vnd.oai.openapi"})
    assert yaml.safe_load(served.content) == yaml.safe_load(DOCUMENT.read_bytes())


def test_every_operation_documents_its_problems() -> None:
    document = yaml.safe_load(DOCUMENT.read_bytes())
    assert len(document["paths"]) > 60
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            wanted = {"400", "401", "403", "404", "405", "406", "422", "503"}
            if method != "get":
                wanted |= {"409", "413", "415"}
            assert wanted <= set(operation["responses"]), (method, path)
            assert operation["description"], (method, path)
    assert not any("secret" in str(name).lower() for name in document["components"]["schemas"]["Key"]["properties"])


def test_the_web_process_imports_no_torch() -> None:
    """Everything that serving needs is imported: the ASGI application, every route, the document, the admin of none."""
    code = """
import sys
import django.conf
import controlplane.asgi
from django.urls import get_resolver
def walk(patterns):
    for pattern in patterns:
        if hasattr(pattern, "url_patterns"):
            walk(pattern.url_patterns)
        else:
            pattern.callback
walk(get_resolver().url_patterns)
from controlplane.api.document import openapi_yaml
openapi_yaml()
from rl_core.environments.registry import ENVIRONMENTS
heavy = {"torch", "numpy", "transformers", "vllm", "workers", "safetensors"} & set(sys.modules)
assert "controlplane.api.views.runs" in sys.modules and "frontend.urls" in sys.modules
print(sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=settings.BASE_DIR,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]
