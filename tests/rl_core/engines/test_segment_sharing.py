"""Replicas of a cluster take segments from each other, over real listeners, and believe nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import engine_factories as make
import engine_process as server
import httpx
import msgspec
import pytest

from rl_core.delta import Base, publish_delta, publish_snapshot, read_manifest
from rl_core.delta.manifest import Segment, StandingSegment
from rl_core.delta.segments import OnSegment
from rl_core.engines.protocol import AnnounceBody, SlotState, SlotStatus, StandingRef
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from rl_core.types import VersionRef

PEER_TOKEN = "between-us"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.endless_model_folder(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def replicas(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    state = tmp_path_factory.mktemp("state")
    (state / "peers").write_text(PEER_TOKEN)
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                server.running_engine(
                    folder, state, name=name, spool=state / f"spool-{name}", **{"peer-token-file": state / "peers"}
                )
            )
            for name in ("a", "b")
        ]
        yield Cluster(folder, state, *engines)


class Cluster:
    """Two replicas on one store, and a chain of versions that grows."""

    def __init__(self, folder: Path, state: Path, a: server.EngineProcess, b: server.EngineProcess) -> None:
        self.state, self.a, self.b = state, a, b
        self.store = open_store((state / "store").as_uri())
        self.weights = read_checkpoint(folder)
        version = VersionRef("line", 0, 0)
        self.last = publish_snapshot(self.store, self.weights, key_prefix="snapshots/x", version=version)
        self.number = 0

    def publish(self, on_segment: OnSegment | None = None) -> Path:
        """A next version; the file of its only segment."""
        self.number += 1
        new = {name: tensor + 1e-3 for name, tensor in self.weights.items()}
        base = Base(f"line:0-{self.number - 1}", self.last.root, self.last.manifest_key)
        version = VersionRef("line", 0, self.number)
        self.last = publish_delta(
            self.store, old=self.weights, new=new, version=version, base=base, fence=0, on_segment=on_segment
        )
        self.weights = new
        (segment,) = read_manifest(self.store, self.last.manifest_key).segments
        return self.state / "store" / segment.key

    def move(self, engine: server.EngineProcess, *, peers: tuple[str, ...] = ()) -> SlotStatus:
        version = f"line:0-{self.number}"
        with engine.control() as control:
            control.set_target(version=version, root=self.last.root, manifest=self.last.manifest_key, peers=peers)
            status = control.wait_version(version)
        assert (status.version, status.root, status.error) == (version, self.last.root, None)
        assert status.state is SlotState.READY
        assert status.update is not None
        return status

    def announce(self, engine: server.EngineProcess, standing: StandingSegment, *, withdrawn: bool = False) -> None:
        """Tell a replica of a segment of the version that is being published; its peer has it too."""
        peer = self.b if engine is self.a else self.a
        body = AnnounceBody(
            version=f"line:0-{self.number}", fence=0, peers=[peer.url], withdrawn=withdrawn, slots=["default"],
            segments=[msgspec.convert(msgspec.to_builtins(standing), type=StandingRef)],
        )  # fmt: skip
        with engine.control() as control:
            control.announce(body)

    def spooled(self, name: str, segment: Segment) -> bool:
        return (self.state / f"spool-{name}" / segment.blake3).exists()

    def digest(self) -> str:
        return read_manifest(self.store, self.last.manifest_key).segments[0].blake3


def test_one_reads_the_store_and_the_other_takes_from_it(replicas: Cluster) -> None:
    segment = replicas.publish()
    size = segment.stat().st_size
    first = replicas.move(replicas.a)
    assert first.update is not None
    assert (first.update.bytes_fetched, first.update.bytes_from_peers) == (size, 0)
    segment.unlink()  # nobody else can have it from the store
    second = replicas.move(replicas.b, peers=("http://127.0.0.1:9", replicas.a.url))
    assert second.update is not None
    assert (second.update.bytes_fetched, second.update.bytes_from_peers) == (size, size)


def test_what_a_peer_sends_is_not_believed(replicas: Cluster) -> None:
    segment = replicas.publish()
    replicas.move(replicas.a)
    spooled = replicas.state / "spool-a" / replicas.digest()
    data = bytearray(spooled.read_bytes())
    data[3] ^= 1
    spooled.write_bytes(data)
    status = replicas.move(replicas.b, peers=(replicas.a.url,))
    assert status.update is not None
    assert (status.update.bytes_fetched, status.update.bytes_from_peers) == (segment.stat().st_size, 0)


def test_segments_are_for_peers_alone(replicas: Cluster) -> None:
    replicas.publish()
    replicas.move(replicas.a)
    url = f"{replicas.a.url}/v1/segments/{replicas.digest()}"

    def ask(token: str, path: str = url, ticket: str = "5") -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.get(path, params={"ticket": ticket}, headers=headers)

    assert ask("").status_code == 401
    assert ask(server.INFERENCE_TOKEN).status_code == 401
    assert ask(PEER_TOKEN).content == (replicas.state / "spool-a" / replicas.digest()).read_bytes()
    assert ask(PEER_TOKEN, f"{replicas.a.url}/v1/segments/{'0' * 64}").status_code == 404
    for path, ticket in ((f"{replicas.a.url}/v1/segments/..%2F..%2Fpeers", "5"), (url, "not hex")):
        assert ask(PEER_TOKEN, path, ticket).status_code in (400, 404)
    # The peers' token opens nothing else.
    assert ask(PEER_TOKEN, f"{replicas.a.url}/v1/models").status_code == 401


def test_progress_is_told_while_a_slow_link_carries_the_bytes(replicas: Cluster) -> None:
    segment = replicas.publish()
    size = segment.stat().st_size
    version = f"line:0-{replicas.number}"
    with replicas.a.control() as control:
        told = control.set_target(
            version=version, root=replicas.last.root, manifest=replicas.last.manifest_key, limit_bytes_s=size
        )
        assert told.slots["default"].state is SlotState.RECONCILING

        def shown() -> bool:
            progress = control.status().slots["default"].progress
            return progress is not None and progress.total_bytes == size and progress.done_bytes < size

        make.wait_until(shown, timeout_s=20)
        status = control.wait_version(version)
    assert status.version == version
    assert status.progress is None


def test_of_two_that_want_it_at_once_one_reads_the_store(replicas: Cluster) -> None:
    replicas.move(replicas.a)
    replicas.move(replicas.b)
    size = replicas.publish().stat().st_size
    version = f"line:0-{replicas.number}"
    pairs = [(replicas.a, replicas.b), (replicas.b, replicas.a)]
    with contextlib.ExitStack() as stack:
        controls = {stack.enter_context(engine.control()): peer.url for engine, peer in pairs}
        for control, peer in controls.items():
            control.set_target(
                version=version, root=replicas.last.root, manifest=replicas.last.manifest_key, peers=[peer],
                limit_bytes_s=size,
            )  # fmt: skip
        updates = [control.wait_version(version).update for control in controls]
    assert all(update is not None and update.bytes_fetched == size for update in updates)
    assert sorted(update.bytes_from_peers for update in updates if update is not None) == [0, size]


def test_segments_come_while_the_version_is_published(replicas: Cluster) -> None:
    """Both have it before there is a manifest, one from the other; until they are given a target they serve the old."""
    replicas.move(replicas.a)
    replicas.move(replicas.b)
    served = replicas.last.root
    told: list[Segment] = []

    def announce(standing: StandingSegment) -> None:
        segment = standing.segment
        told.append(segment)
        for engine in (replicas.a, replicas.b):
            replicas.announce(engine, standing)
        make.wait_until(lambda: replicas.spooled("a", segment) and replicas.spooled("b", segment), timeout_s=20)
        prefix = segment.key.partition("/segments/")[0]
        assert not (replicas.state / "store" / prefix / "manifest.json").exists()

    replicas.publish(announce).unlink()
    (segment,) = told
    for engine in (replicas.a, replicas.b):
        with engine.control() as control:
            assert control.status().slots["default"].root == served
    updates = [replicas.move(engine).update for engine in (replicas.a, replicas.b)]
    assert all(update is not None and update.bytes_fetched == segment.size for update in updates)
    assert sorted(update.bytes_from_peers for update in updates if update is not None) == [0, segment.size]


def test_a_version_that_never_commits_leaves_nothing(replicas: Cluster) -> None:
    replicas.move(replicas.a)
    served = replicas.last

    def lose(standing: StandingSegment) -> None:
        replicas.announce(replicas.a, standing)
        make.wait_until(lambda: replicas.spooled("a", standing.segment), timeout_s=20)
        replicas.announce(replicas.a, standing, withdrawn=True)
        assert not replicas.spooled("a", standing.segment)
        raise KeyError("its trainer gave it up")

    with pytest.raises(KeyError):
        replicas.publish(lose)
    assert replicas.last == served
    with replicas.a.control() as control:
        status = control.status().slots["default"]
    assert (status.root, status.state, status.error) == (served.root, SlotState.READY, None)
    replicas.number -= 1
    update = replicas.publish() and replicas.move(replicas.a).update
    assert update is not None
    assert update.hops == 1  # from what it was: its copy of the weights was whole


def test_announcements_are_the_control_planes_alone(replicas: Cluster) -> None:
    url = f"{replicas.a.control_url}/control/segments"
    body = {"version": "line:0-9", "fence": 0, "segments": [{"segment": ["../../etc/passwd", 4, "0" * 64]}]}
    assert httpx.post(url, json=body).status_code == 401
    headers = {"Authorization": f"Bearer {server.CONTROL_TOKEN}"}
    assert httpx.post(url, json=body, headers=headers).status_code == 400
    segment, frame = ["a/b", 4, "0" * 64], {"segment": 0, "offset": 0, "size": 4, "xxh3": "0" * 16, "changes": 1}
    for change in (
        {"version": "newest"},
        {"segments": [{"segment": ["a/b", 0, "0" * 64]}]},
        {"segments": [{"segment": ["a/b", 4, "0" * 63]}]},
        {"segments": [{"segment": segment, "draft": ["0" * 64, "frames/3", "0" * 63]}]},
        {"segments": [{"segment": segment, "frames": [frame]}]},
        {"segments": [{"segment": segment, "frames": [frame | {"mode": "magic", "ranges": [[0, 0, 1]]}]}]},
        {"segments": [{"segment": segment, "frames": [frame | {"mode": "hazard", "ranges": [[0, 0]]}]}]},
    ):
        answer = httpx.post(url, json=body | {"segments": []} | change, headers=headers)
        assert answer.status_code == 400, change
    told = [{"segment": segment, "frames": [frame | {"mode": "hazard", "ranges": [[0, 0, 1]]}]}]
    assert httpx.post(url, json=body | {"segments": told}, headers=headers).status_code == 202
