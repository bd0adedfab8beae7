"""What tests share: a vLLM, as to start one takes longer than most of them, and the bytecode of what it imports."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from vllm_bench import Bench


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Each vLLM is up to four processes, each of which would compile all of vLLM and torch where none may keep that."""
    with tempfile.TemporaryDirectory(prefix="vllm-bytecode-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPYCACHEPREFIX", folder)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("bench"))
    try:
        made.start()
        yield made
    finally:
        made.end()
