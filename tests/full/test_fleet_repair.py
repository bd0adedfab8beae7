"""A replica's repair over the wire: everything comes from the snapshot, though it believes to hold the version."""

from __future__ import annotations

import pytest
from rollback_rig import served_lane

from controlplane.models import Transfer
from controlplane.services.steering import replica_repair
from controlplane.states import ReleaseState, ReplicaState, TransferState, WeightSlot
from tests.domain_factories import TESTER

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


def test_a_repair_fetches_what_the_replica_believes_to_hold(tmp_path, settings, test_database_url):
    with served_lane(tmp_path, settings, test_database_url, slots=1, doors=1, state=ReleaseState.PROMOTED) as served:
        promoted = served.lane().promoted_version
        served.hold({WeightSlot.DEFAULT: promoted})
        plain = Transfer.objects.latest("pk")
        replica_repair(replica=served.world.replica, actor=TESTER, reason="bits may have flipped")
        served.turn()
        repair = Transfer.objects.latest("pk")
        assert repair.pk != plain.pk
        assert (repair.state, repair.repair, repair.version_id) == (TransferState.DONE, True, promoted.pk)
        assert (repair.hops, repair.fetched_bytes) == (1, repair.done_bytes)
        assert repair.fetched_bytes > 0
        served.turn()
        served.world.replica.refresh_from_db()
        slot = served.world.replica.slots.get()
        assert (served.world.replica.state, slot.current_root, slot.fault) == (ReplicaState.READY, promoted.root, "")
