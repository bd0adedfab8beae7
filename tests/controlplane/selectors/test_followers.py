"""Who follows a run, what its links gave, and the profile that comes of it."""

import pytest
from django.utils import timezone

from controlplane.models import Cluster, Publication, Replica, ReplicaSlot, Transfer
from controlplane.selectors.followers import followers, profile_for
from controlplane.services.fleet import replica_register
from controlplane.states import DesiredSource, PublicationKind, ReplicaState, TransferState
from rl_core.types import Profile
from tests.controlplane.selectors.test_publications import grow
from tests.domain_factories import TESTER, make_run, make_spec

pytestmark = pytest.mark.django_db


def follow(run, version, *slugs):
    """Replicas of these clusters are told to hold the version as the run's head."""
    slots = ReplicaSlot.objects.filter(replica__cluster__slug__in=slugs)
    slots.update(desired_version=version, desired_source=DesiredSource.TRAINING_HEAD)


def arrive(version, slug, *, bytes_per_s, decode_s=1.0, **values):
    """The version's delta came to a cluster."""
    replica = Replica.objects.filter(cluster__slug=slug).first()
    row = {"state": TransferState.DONE, "hops": 1, "finished_at": timezone.now(), "timings": {"decode_s": decode_s}}
    return Transfer.objects.create(
        replica=replica, slot="default", version=version, bytes_per_s=bytes_per_s, **{**row, **values}
    )


def encoded(version, *, size, encode_s, upload_s=None, profile=Profile.SMALL):
    Publication.objects.filter(version=version, kind=PublicationKind.DELTA).update(
        bytes=size, encode_s=encode_s, upload_s=upload_s, profile=profile.value
    )


def test_the_slowest_link_of_the_followers_decides():
    run = make_run()
    _, first, second = grow(run, 2)
    encoded(first, size=10_000_000, encode_s=2.0)
    encoded(second, size=1_000_000_000, encode_s=10.0)
    follow(run, second, "east", "west")
    assert profile_for(run).reason == "no link has been measured yet"
    for rate in (3e9, 1e9, 2e9):
        arrive(second, "east", bytes_per_s=rate)
    assert profile_for(run).profile is Profile.FAST
    assert "to east" in profile_for(run).reason
    arrive(second, "west", bytes_per_s=1e6, decode_s=3.0)
    choice = profile_for(run)
    assert (choice.profile, choice.reason) == (Profile.SMALL, "1e+03 s at 1 MB/s to west; fast takes 1.3e+03 s")
    # West follows another run now: its link is nobody's concern.
    ReplicaSlot.objects.filter(replica__cluster__slug="west").update(desired_version=None, desired_source="")
    assert profile_for(run).profile is Profile.FAST


def test_a_slower_way_to_the_store_decides():
    run = make_run()
    _, first = grow(run, 1)
    encoded(first, size=1_000_000_000, encode_s=10.0)
    follow(run, first, "east")
    arrive(first, "east", bytes_per_s=2e9)
    assert profile_for(run).profile is Profile.FAST
    encoded(first, size=1_000_000_000, encode_s=10.0, upload_s=100.0)
    choice = profile_for(run)
    assert (choice.profile, choice.reason) == (Profile.SMALL, "100 s at 10 MB/s to the store; fast takes 130 s")


def test_only_single_deltas_read_from_the_store_count():
    run = make_run()
    _, first = grow(run, 1)
    encoded(first, size=1_000_000_000, encode_s=10.0)
    follow(run, first, "east")
    arrive(first, "east", bytes_per_s=1e6, hops=2)
    arrive(first, "east", bytes_per_s=1e6, repair=True)
    arrive(first, "east", bytes_per_s=1e6, state=TransferState.FAILED)
    arrive(first, "east", bytes_per_s=None)  # all from peers
    assert profile_for(run).reason == "no link has been measured yet"
    arrive(first, "east", bytes_per_s=2e9)
    assert profile_for(run).profile is Profile.FAST


def test_what_the_spec_says_is_taken():
    run = make_run(spec=make_spec() | {"delta_profile": "fast"})
    choice = profile_for(run)
    assert (choice.profile, choice.reason) == (Profile.FAST, "the run's spec says so")


def test_followers_share_their_clusters_link_and_know_each_other():
    run = make_run()
    (first,) = grow(run, 0)
    east = Cluster.objects.get(slug="east")
    second = replica_register(
        cluster=east, name="east-1", inference_url="http://127.0.0.1:3", control_url="http://127.0.0.1:4", actor=TESTER
    )
    Replica.objects.filter(pk=second.pk).update(state=ReplicaState.READY)
    Cluster.objects.filter(pk=east.pk).update(bandwidth_bytes_s=900)
    follow(run, first, "east", "west")
    Replica.objects.filter(cluster__slug="west").update(state=ReplicaState.OFFLINE)
    found = [(one.replica.name, one.peers, one.limit_bytes_s) for one in followers(run)]
    assert found == [("east-0", ["http://127.0.0.1:3"], 450), ("east-1", ["http://127.0.0.1:1"], 450)]
    assert [one.slots for one in followers(run)] == [["default"], ["default"]]
    ReplicaSlot.objects.filter(replica=second).update(desired_source=DesiredSource.PINNED)
    assert [(one.replica.name, one.peers) for one in followers(run)] == [("east-0", [])]
