"""What tests of the gateway share: a lane with replicas that can be asked, and the application behind a socket."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

import engine_process as server
import openai
import uvicorn

from controlplane.asgi import application
from controlplane.gateway.state import Gateway
from controlplane.models import Generation, Replica, ReplicaSlot
from controlplane.services.fleet import replica_register
from controlplane.services.tenancy import api_key_create
from controlplane.states import ReplicaState, Scope
from tests.lane_rows import ACTOR, LaneWorld

BASE = "http://localhost"
MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclass
class GatewayWorld(LaneWorld):
    """A lane with replicas that can be asked, and the folder where their tokens are."""

    tokens: Path
    root: str

    def hold(self, engine, version, *, slot="default"):
        """Let an engine serve a version (all have the same weights under other names)."""
        with engine.control() as control:
            control.set_target(version=str(version), root=self.root, manifest="none/manifest.json", slot=slot)
            assert control.wait_version(str(version), slot=slot, timeout_s=60).version == str(version)

    def place(self, url, *, name="serving-0", versions=None, token=server.INFERENCE_TOKEN):
        """A ready replica at `url` that holds `versions` by slot."""
        replica = replica_register(
            cluster=self.cluster, name=name, inference_url=url, control_url=url, actor=ACTOR, weight_slots=2
        )
        Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY)
        held = versions or {"default": self.lane.promoted_version}
        for slot in ReplicaSlot.objects.filter(replica=replica):
            slot.current_version = held.get(slot.slot)
            slot.save(update_fields=["current_version"])
        (self.tokens / f"{replica.pk}.inference").write_text(token)
        return replica

    def key(self, *scopes):
        """A key's secret text."""
        wanted = list(scopes or [Scope.GATEWAY])
        _, secret = api_key_create(project=self.project, name="app", scopes=wanted, actor=ACTOR)
        return secret

    def version(self):
        """What the lane's users get."""
        return self.lane.promoted_version


class _Listener(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def listening():
    """Serve the application on a port of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(
            application, log_config=None, lifespan="off", access_log=False, timeout_graceful_shutdown=2
        )
        listener = _Listener(config)
        task = asyncio.create_task(listener.serve(sockets=[sock]))
        while not listener.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        listener.should_exit = True
        await task
    await Gateway.here().replicas.aclose()


def openai_client(web, secret):
    """OpenAI's library over the application without a socket."""
    return openai.AsyncOpenAI(api_key=secret, base_url=f"{BASE}/v1", http_client=web, max_retries=0)


async def generation_of(answer):
    """The row of an answer, a chunk or a choice."""
    text = getattr(answer, "generation_id", None) or answer.id
    return await Generation.objects.select_related("version").aget(id=text[-36:])


async def until(condition, *, timeout_s=60.0):
    """Wait for an asynchronous condition."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)
