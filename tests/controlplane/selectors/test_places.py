"""Where rollouts may be generated is read in as many queries for one replica as for many."""

import pytest

from controlplane.conductor.fleet import slots_reconcile
from controlplane.selectors.rollout_plans import places
from tests.domain_factories import make_cluster, make_project

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_cluster_shares_its_capacity_among_its_replicas(django_assert_num_queries, replicas):
    project = make_project()
    make_cluster(project, capacity=8, replicas=replicas)
    make_cluster(project, slug="other", capacity=3)
    slots_reconcile()
    with django_assert_num_queries(3):
        found = places({project.pk})
    shares = {(place.cluster, place.capacity) for place in found}
    assert shares == {("east", 8 // replicas), ("other", 3)}
    assert len(found) == replicas + 1
