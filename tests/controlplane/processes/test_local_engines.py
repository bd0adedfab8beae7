"""Which engines `manage.py up` runs."""

import pytest

from controlplane.models import Cluster, ModelCard
from controlplane.processes.local_engines import LocalEngines
from controlplane.states import WeightSlot
from rl_core.engines.__main__ import slot_names
from tests.lane_rows import lane_world

pytestmark = pytest.mark.django_db


@pytest.fixture
def local(tmp_path, settings):
    """A lane whose cluster is local and whose model has a folder."""
    settings.REPLICA_TOKEN_DIR = tmp_path / "tokens"
    world = lane_world()
    Cluster.objects.filter(pk=world.cluster.pk).update(local=True)
    ModelCard.objects.filter(pk=world.model.pk).update(folder=str(tmp_path))
    return world


def test_an_engine_calls_its_slots_what_the_control_plane_asks_for():
    for count in range(1, len(WeightSlot) + 1):
        assert slot_names(str(count)) == tuple(list(WeightSlot)[:count])


def test_engines_of_every_local_cluster_run_unless_some_are_named(local, settings):
    settings.UPDATE_THREADS = 3
    [spec] = LocalEngines().new_specs()
    assert "--max-len 1024" in " ".join(spec.argv)
    assert "--weight-slots default,candidate" in " ".join(spec.argv)
    assert "--update-threads 3" in " ".join(spec.argv)
    assert not any(spec.env[name] for name in ("SECRET_KEY", "DATABASE_URL", "REDIS_URL", "BROKER_URL"))
    assert LocalEngines(clusters=["elsewhere"]).new_specs() == []
    [spec] = LocalEngines(clusters=[local.cluster.slug], max_tokens=256).new_specs()
    assert "--max-len 256" in " ".join(spec.argv)


def test_each_replica_is_said_once(local):
    engines = LocalEngines()
    assert len(engines.new_specs()) == 1
    assert engines.new_specs() == []
