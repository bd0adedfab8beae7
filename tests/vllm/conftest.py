"""The vLLM that tests share: to start one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_bench import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("bench"))
    try:
        made.start()
        yield made
    finally:
        made.end()
