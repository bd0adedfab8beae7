"""Lanes are created on serving clusters of their own."""

from __future__ import annotations

import threading

import pytest
from django.db import IntegrityError, connections, transaction

from controlplane.errors import Conflict, Invalid
from controlplane.models import Lane
from controlplane.services.lanes import lane_create
from rl_core.types import ClusterRole
from tests.domain_factories import make_cluster
from tests.lane_rows import ACTOR, lane_world

pytestmark = pytest.mark.django_db


def create(world, cluster, slug="second"):
    return lane_create(project=world.project, slug=slug, cluster=cluster, model=world.model, actor=ACTOR)


def test_a_cluster_has_one_lane():
    world = lane_world()
    with pytest.raises(Conflict, match="serves lane assistant already") as refused:
        create(world, world.cluster)
    assert refused.value.field == "cluster"
    second = create(world, make_cluster(world.project, slug="other", role=ClusterRole.SERVING))
    with pytest.raises(IntegrityError, match="one_lane_of_a_cluster"), transaction.atomic():
        Lane.objects.filter(pk=second.pk).update(cluster=world.cluster)


def test_a_lane_needs_a_serving_cluster():
    world = lane_world()
    with pytest.raises(Invalid, match="not a serving cluster"):
        create(world, make_cluster(world.project, slug="rollouts"))


@pytest.mark.django_db(transaction=True)
def test_of_two_lanes_made_at_once_one_is_refused():
    world = lane_world()
    cluster = make_cluster(world.project, slug="other", role=ClusterRole.SERVING)
    refused = []

    def make(slug):
        try:
            create(world, cluster, slug)
        except Conflict as error:
            refused.append(error.field)
        finally:
            connections.close_all()

    makers = [threading.Thread(target=make, args=(slug,)) for slug in ("second", "third")]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert refused == ["cluster"]
    assert Lane.objects.filter(cluster=cluster).count() == 1
