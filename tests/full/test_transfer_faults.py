"""A replica whose store fails, and one killed in the middle of an update: a real engine over a real S3 protocol."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import engine_factories as make
import engine_process as server
import httpx
import msgspec
import pytest
from s3_server import Fault, S3Server, running_s3

from rl_core.delta import Base, Published, publish_delta, read_manifest, weights_root
from rl_core.delta.frames import plan_frames
from rl_core.engines.protocol import AnnounceBody, SegmentRef, SlotState, SlotStatus, StandingRef
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import ObjectStore, open_store
from rl_core.types import VersionRef

pytestmark = pytest.mark.full

VERSION = "line:0-1"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, running_s3() as process:
        for name, value in process.environment().items():
            patch.setenv(name, value)
        yield process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.endless_model_folder(tmp_path_factory.mktemp("models") / "m")


def publish(store: ObjectStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """Version 0-1 of the folder's weights, in many small segments."""
    monkeypatch.setattr("rl_core.delta.publisher.SEGMENT_BYTES", 8 << 10)
    monkeypatch.setattr("rl_core.delta.publisher.plan_frames", partial(plan_frames, frame_bytes=16 << 10))
    old = read_checkpoint(folder)
    new = {name: tensor + 1e-3 for name, tensor in old.items()}
    base = Base("line:0-0", weights_root(old))
    return publish_delta(store, old=old, new=new, version=VersionRef("line", 0, 1), base=base, fence=0)


def still_serves(engine: server.EngineProcess, root: str) -> None:
    """It generates, with the weights that it had."""
    with engine.control() as control:
        status = control.status().slots["default"]
    assert (status.version, status.root) == (None, root)
    answer = httpx.post(
        f"{engine.url}/v1/generate",
        json={"prompt_token_ids": [5, 6, 7], "sampling": {"max_tokens": 3}},
        headers={"Authorization": f"Bearer {server.INFERENCE_TOKEN}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text


def aim(engine: server.EngineProcess, published: Published, *, manifest: str | None = None) -> SlotStatus:
    with engine.control() as control:
        control.set_target(version=VERSION, root=published.root, manifest=manifest or published.manifest_key)
        return control.wait_version(VERSION, timeout_s=120)


def test_a_store_that_fails_leaves_the_old_version_serving(
    s3: S3Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, root = s3.url(), weights_root(read_checkpoint(folder))
    store = open_store(url)
    published = publish(store, folder, monkeypatch)
    manifest = read_manifest(store, published.manifest_key)
    newer = msgspec.structs.replace(manifest, format=99)
    store.put("odd/newer/manifest.json", msgspec.json.encode(newer))
    damaged = bytearray(store.get(published.manifest_key))
    damaged[len(damaged) // 2] ^= 1
    store.put("odd/damaged/manifest.json", damaged)
    other = {name: tensor - 1 for name, tensor in read_checkpoint(folder).items()}
    elsewhere = publish_delta(
        store,
        old=other,
        new={name: tensor + 1e-3 for name, tensor in other.items()},
        version=VersionRef("line", 0, 1),
        base=Base("line:0-0", weights_root(other)),
        fence=7,
    )
    with server.running_engine(folder, tmp_path / "state", store=url, spool=tmp_path / "spool") as engine:
        still_serves(engine, root)
        for key, code in (
            ("odd/newer/manifest.json", "manifest_invalid"),
            ("odd/damaged/manifest.json", "manifest_invalid"),
            ("odd/none/manifest.json", "object_missing"),
        ):
            status = aim(engine, published, manifest=key)
            assert (status.error_code, status.state) == (code, SlotState.READY)
            still_serves(engine, root)
        assert aim(engine, elsewhere).error_code == "base_mismatch"
        still_serves(engine, root)
        s3.faults = lambda request: Fault.BUSY if "/segments/" in request.path else None
        status = aim(engine, published)
        assert (status.error_code, status.state) == ("store_unavailable", SlotState.READY)
        still_serves(engine, root)
        s3.faults = lambda request: Fault.SLOW
        status = aim(engine, published)
        assert (status.version, status.root, status.error) == (VERSION, published.root, None)
        s3.reset()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system of our own can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_under_the_spool_is_a_warning(
    s3: S3Server, folder: Path, tmp_path: Path, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Announced or targeted, what the disk does not take passes through memory, and is read again where it must be."""
    url = s3.url()
    published = publish(open_store(url), folder, monkeypatch)
    segments = read_manifest(open_store(url), published.manifest_key).segments
    assert sum(segment.size for segment in segments) > 2 * (64 << 10)
    with server.running_engine(folder, tmp_path / "state", store=url, spool=full_disk / "spool") as engine:
        with engine.control() as control:
            told = [StandingRef(SegmentRef(segment.key, segment.size, segment.blake3)) for segment in segments]
            control.announce(AnnounceBody(version=VERSION, fence=0, segments=told))
        make.wait_until(lambda: any((full_disk / "spool").glob("[0-9a-f]*")), timeout_s=120)
        status = aim(engine, published)
        assert (status.version, status.root, status.error) == (VERSION, published.root, None)
        assert status.update is not None
        assert status.update.bytes_fetched == sum(segment.size for segment in segments)
        assert not list((full_disk / "spool").glob(".part-*"))
        engine.process.kill()
        assert engine.process.stderr is not None
        assert "spool_full" in engine.process.stderr.read()


def test_a_replica_killed_in_the_middle_goes_on_from_its_spool(
    s3: S3Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, root = s3.url(), weights_root(read_checkpoint(folder))
    published = publish(open_store(url), folder, monkeypatch)
    total = sum(segment.size for segment in read_manifest(open_store(url), published.manifest_key).segments)
    start = partial(server.running_engine, folder, tmp_path / "state", store=url, spool=tmp_path / "spool")
    with start() as engine, engine.control() as control:
        control.set_target(
            version=VERSION, root=published.root, manifest=published.manifest_key, limit_bytes_s=total / 30
        )

        def half_way() -> bool:
            progress = control.status().slots["default"].progress
            return progress is not None and total / 3 < progress.done_bytes < total

        make.wait_until(half_way, timeout_s=120)
        still_serves(engine, root)
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait(60)
    with start() as engine:
        still_serves(engine, root)
        status = aim(engine, published)
        assert (status.version, status.root, status.error) == (VERSION, published.root, None)
        assert status.update is not None
        assert 0 < status.update.bytes_fetched < total * 0.75
