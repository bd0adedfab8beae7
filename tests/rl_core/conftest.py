"""Stores that tests of the store and of deltas run against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Server, now_and_then, running_s3


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 server without faults, named by the environment."""
    for name, value in s3_process.environment().items():
        monkeypatch.setenv(name, value)
    s3_process.reset()
    return s3_process


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.full)])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store: a folder, and (in the full run) a prefix on an S3 server that fails now and then."""
    if request.param == "local":
        return (tmp_path / "store").as_uri()
    server: S3Server = request.getfixturevalue("s3")
    server.faults = now_and_then(every=8)
    return server.url()
