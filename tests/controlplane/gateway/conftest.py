"""A served gateway in front of a real engine, or of a script."""

import engine_factories as make
import engine_process as server
import httpx
import openai
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async

from controlplane.asgi import application
from controlplane.gateway.state import Gateway
from controlplane.models import ModelCard
from rl_core.delta import weights_root
from rl_core.models.checkpoint import read_checkpoint
from tests.controlplane.gateway.gateway_rig import BASE, GatewayWorld, listening
from tests.lane_rows import lane_world


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make.endless_model_folder(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="session")
def engine(folder, tmp_path_factory):
    slots = {"weight-slots": "default,candidate"}
    with server.running_engine(folder, tmp_path_factory.mktemp("state"), **slots) as one:
        yield one


@pytest.fixture
def bare(folder, settings, tmp_path):
    """A lane whose one replica is not there yet."""
    settings.STORE_URL = (tmp_path / "store").as_uri()
    settings.REPLICA_TOKEN_DIR = tmp_path
    made = lane_world(system_prompt="Be short.")
    ModelCard.objects.filter(pk=made.model.pk).update(folder=str(folder))
    made.model.refresh_from_db()
    assert made.lane.promoted_version  # read here, because tests are asynchronous
    root = weights_root(read_checkpoint(folder))
    return GatewayWorld(**vars(made), tokens=tmp_path, root=root)


@pytest.fixture
def world(bare, engine):
    """A lane whose replica is the real engine, holding the lane's version."""
    bare.hold(engine, bare.version())
    bare.place(engine.url)
    return bare


@pytest_asyncio.fixture
async def served():
    """The web process's application behind a real socket; its address."""
    async with listening() as address:
        yield address


@pytest_asyncio.fixture
async def web():
    """The application without a socket: answers come whole."""
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
        yield client
    await Gateway.here().replicas.aclose()


@pytest_asyncio.fixture
async def client(served, bare):
    """OpenAI's library with a gateway key of the project, without retries of its own."""
    secret = await sync_to_async(bare.key)()
    async with openai.AsyncOpenAI(api_key=secret, base_url=f"{served}/v1", max_retries=0) as one:
        yield one
