"""A lane under load: an engine that holds real weights, web processes over one database, users who go on asking."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_factories as make
import engine_process as server
import httpx
from django.conf import settings as slipway
from django.db.models.functions import Now
from rollback_users import Crowd

from controlplane.conductor.fleet import fleet_poll, slots_reconcile
from controlplane.conductor.lanes import lanes_place
from controlplane.conductor.shipping import advance_lanes
from controlplane.models import Generation, Lane, ModelCard, PolicyVersion, Publication, Release, WorkUnit
from controlplane.processes.ports import free_port
from controlplane.processes.specs import web_spec
from controlplane.services.fleet import replica_register, slot_target
from controlplane.services.tenancy import api_key_create
from controlplane.states import DesiredSource, PublicationKind, ReleaseState, Scope, WeightSlot, WorkKind, WorkState
from rl_core.delta import publish_snapshot
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from tests.lane_rows import ACTOR, LaneWorld
from tests.shipping_rig import propose, put_in, shipping_world
from workers import base, transfer
from workers.base import work_on


@dataclass
class Web:
    """A web process that can be started again."""

    env: dict[str, str]
    log: Path
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; it answers a little later."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(web_spec(port=self.port).argv, env=self.env, stdout=output, stderr=output)

    def wait(self) -> None:
        """Until it answers."""
        assert self._process is not None
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/healthz", timeout=2, trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"the web process did not come up: {self.log.read_text()[-2000:]}")

    def end(self, *, kill: bool = False) -> None:
        """As its supervisor ends it, or as `kill -9`."""
        if self._process is not None:
            (self._process.kill if kill else self._process.terminate)()
            self._process.wait(60)
            self._process = None


@dataclass
class Served:
    """A lane whose bad version answers, the one before it, and everything that serves them."""

    world: LaneWorld
    first: PolicyVersion
    release: Release
    webs: list[Web]
    keys: dict[Scope, str]

    @property
    def bad(self) -> PolicyVersion:
        """The newer version."""
        return self.release.version

    def start_webs(self) -> None:
        """All web processes, until they answer."""
        for web in self.webs:
            web.start()
        for web in self.webs:
            web.wait()

    @contextlib.contextmanager
    def crowd(self, users: int) -> Iterator[Crowd]:
        """Users under way at all doors."""
        crowd = self.doors()
        crowd.begin(users)
        try:
            yield crowd
        finally:
            crowd.end()

    def doors(self) -> Crowd:
        """The lane's users, none of whom asks yet."""
        headers = {"Authorization": f"Bearer {self.keys[Scope.GATEWAY]}"}
        return Crowd([web.url for web in self.webs], headers)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """One change by the API of the first web process."""
        answer = httpx.post(
            f"{self.webs[0].url}/api/v1/projects/{self.world.project.slug}/{path}",
            json=body,
            headers={"Authorization": f"Bearer {self.keys[Scope.RELEASES]}"},
            timeout=30,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def turn(self) -> None:
        """What the conductor does for lanes and replicas, and the transfer worker after it, once."""
        fleet_poll()
        slots_reconcile()
        advance_lanes()
        lanes_place()
        for unit in WorkUnit.objects.filter(kind=WorkKind.TRANSFER, state=WorkState.QUEUED):
            work_on(unit.pk, transfer.transfer)

    def turn_for(self, seconds: float) -> None:
        """Turn as long as that."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn()
            time.sleep(0.2)

    def turn_until(self, holds: Callable[[], bool]) -> None:
        """Turn until it holds."""
        deadline = time.monotonic() + 180
        while not holds():
            assert time.monotonic() < deadline
            self.turn()
            time.sleep(0.2)

    def hold(self, slots: dict[WeightSlot, PolicyVersion]) -> None:
        """Let the replica load these versions."""
        for slot, version in slots.items():
            source = DesiredSource.PROMOTED if version == self.lane().promoted_version else DesiredSource.CANDIDATE
            slot_target(replica=self.world.replica, slot=slot, version=version, source=source, actor=ACTOR)
        deadline = time.monotonic() + 180
        rows = self.world.replica.slots
        while any(not rows.filter(slot=slot, current_version=version).exists() for slot, version in slots.items()):
            assert time.monotonic() < deadline, list(rows.values())
            self.turn()

    def lane(self) -> Lane:
        """The lane as it is now."""
        return Lane.objects.select_related("promoted_version").get(pk=self.world.lane.pk)

    def last_admitted_s(self, version: PolicyVersion) -> float:
        """When the gateway took the last request that it gave to this version, however that ended.

        A generation's id is made in the web process before a replica is asked, and begins with the time (UUIDv7).
        """
        return max(pk.int >> 80 for pk in Generation.objects.filter(version=version).values_list("id", flat=True)) / 1e3


@contextlib.contextmanager
def served_lane(
    tmp_path: Path, settings: Any, database_url: str, *, slots: int, doors: int, state: ReleaseState
) -> Iterator[Served]:
    """The lane with its release in `state`, an engine of so many slots, and so many web processes; nothing held yet."""
    home = tmp_path / "home"
    settings.STORE_URL = (tmp_path / "engine" / "store").as_uri()
    settings.REPLICA_TOKEN_DIR = home / "run" / "tokens"
    settings.REPLICA_TOKEN_DIR.mkdir(parents=True)
    (home / "static").mkdir()
    base.store.cache_clear()
    folder = make.endless_model_folder(tmp_path / "model")
    world = shipping_world()
    ModelCard.objects.filter(pk=world.model.pk).update(folder=str(folder))
    release = put_in(propose(world), state)
    first = release.incumbent
    assert first is not None
    weights = read_checkpoint(folder)
    _publish(first, weights)
    _publish(release.version, {**weights, **make.perturbed(weights, seed=1)})
    flags = {"weight-slots": ",".join(list(WeightSlot)[:slots]), "max-seqs": 32}
    env = {**os.environ, "DATABASE_URL": database_url, "SLIPWAY_STATE": str(home), "STORE_URL": settings.STORE_URL}
    webs = [Web(env, tmp_path / f"web-{number}.log") for number in range(doors)]
    keys = {s: api_key_create(project=world.project, name=s, scopes=[s], actor=ACTOR)[1] for s in _SCOPES}
    try:
        with server.running_engine(folder, tmp_path / "engine", **flags) as engine:
            _register(world, engine, slots)
            served = Served(world, first, release, webs, keys)
            served.start_webs()
            yield served
    finally:
        for web in webs:
            web.end()
        base.store.cache_clear()


_SCOPES = (Scope.GATEWAY, Scope.RELEASES)


def _publish(version: PolicyVersion, weights: dict[str, Any]) -> None:
    store = open_store(slipway.STORE_URL)
    made = publish_snapshot(store, weights, key_prefix=f"snapshots/{version.pk}", version=version.ref)
    version.root, version.manifest_key, version.snapshot_key = made.root, made.manifest_key, made.manifest_key
    version.save(update_fields=["root", "manifest_key", "snapshot_key"])
    Publication.objects.filter(version=version).delete()
    Publication.objects.create(
        version=version,
        kind=PublicationKind.SNAPSHOT,
        root=made.root,
        manifest_key=made.manifest_key,
        bytes=made.bytes,
        full_bytes=made.full_bytes,
        published_at=Now(),
    )


def _register(world: LaneWorld, engine: server.EngineProcess, slots: int) -> None:
    world.replica = replica_register(
        cluster=world.cluster,
        name=world.replica.name,
        inference_url=engine.url,
        control_url=engine.control_url,
        actor=ACTOR,
        weight_slots=slots,
    )
    world.replica.slots.update(current_version=None, desired_version=None)
    for kind, token in (("inference", server.INFERENCE_TOKEN), ("control", server.CONTROL_TOKEN)):
        (slipway.REPLICA_TOKEN_DIR / f"{world.replica.pk}.{kind}").write_text(token)
