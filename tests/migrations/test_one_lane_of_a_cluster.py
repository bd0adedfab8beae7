"""Databases from before a cluster had one lane at most: their later lanes get clusters of their own."""

from collections.abc import Iterator

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from controlplane.models import Cluster, Lane
from controlplane.services.fleet import cluster_create
from rl_core.types import ClusterRole
from tests.domain_factories import TESTER
from tests.lane_rows import lane_world

BEFORE = [("controlplane", "0021_exports")]


@pytest.fixture
def rows_before(transactional_db: None) -> Iterator[None]:
    """The schema goes forward again in the end, whatever the test left in it."""
    yield
    executor = MigrationExecutor(connection)
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE controlplane_lane CASCADE")
    executor.migrate(executor.loader.graph.leaf_nodes())


def test_later_lanes_move_to_clusters_of_their_own(rows_before):
    world = lane_world()
    first, cluster = world.lane, world.cluster
    cluster_create(
        project=world.project, slug="serving-second", role=ClusterRole.SERVING, region="x", capacity=1, actor=TESTER
    )
    executor = MigrationExecutor(connection)
    leaves = executor.loader.graph.leaf_nodes()
    old = executor.migrate(BEFORE).apps.get_model("controlplane", "Lane")
    for slug in ("second", "third"):
        old.objects.create(
            project_id=world.project.pk, slug=slug, cluster_id=cluster.pk, model_id=first.model_id, salt=slug
        )
    executor = MigrationExecutor(connection)
    executor.migrate(leaves)
    assert Lane.objects.get(slug=first.slug).cluster == cluster
    assert dict(Lane.objects.values_list("slug", "cluster__slug")) == {
        first.slug: "serving",
        "second": "serving-second-2",
        "third": "serving-third",
    }
    made = Cluster.objects.get(slug="serving-third")
    assert (made.role, made.region, made.model, made.capacity) == ("serving", "local", cluster.model, cluster.capacity)
    assert not made.replicas.exists()
    assert cluster.replicas.get() == world.replica
