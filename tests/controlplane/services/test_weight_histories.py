"""Whatever happens to versions, replicas and releases: each reader comes to each version that is left."""

import pytest
from django.db import transaction
from django.db.models import F

from controlplane.conductor.storage import retire_versions
from controlplane.errors import Conflict
from controlplane.models import PolicyVersion, Publication, ReplicaSlot, Run, Transfer, WorkUnit
from controlplane.selectors.versions_needed import versions_needed
from controlplane.services.derivations import derivations_plan
from controlplane.services.garbage import garbage_collect
from controlplane.services.retention import version_hold
from controlplane.services.work import work_replay
from controlplane.states import PublicationKind, RunState, TransferState, VersionState, WorkState
from rl_core.formats import serving_weights
from rl_core.store import open_store
from rl_core.types import WeightFormat
from tests.domain_factories import TESTER
from tests.weight_history import WeightHistory
from workers import base

LONG_AGO = "2026-01-01T00:00Z"


@pytest.fixture
def history(tmp_path, settings, request, monkeypatch):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    settings.SKIP_DELTAS, settings.SNAPSHOT_EVERY, settings.RETENTION_VERSIONS = [2, 4], 6, 1
    settings.SERVING_FORMATS, settings.GARBAGE_GRACE_S = [], 0
    monkeypatch.setattr("controlplane.selectors.versions_needed._SLACK", 1)
    base.store.cache_clear()
    yield WeightHistory(open_store(settings.STORE_URL), tmp_path / "model", seed=getattr(request, "param", 0))
    base.store.cache_clear()


@pytest.mark.django_db(transaction=True)
def test_skips_and_snapshots_are_made_and_shorten_the_way(history):
    run = history.run()
    versions = [run.lineage.head] + [history.commit(run) for _ in range(6)]
    assert derivations_plan() == 5  # 0→2, 2→4, 4→6, 0→4, and a snapshot of 6
    assert derivations_plan() == 0
    assert history.derive_all() == 5
    made = Publication.objects.filter(kind=PublicationKind.SKIP).order_by("version__depth", "base_version__depth")
    assert [(row.base_version.depth, row.version.depth) for row in made] == [(0, 2), (0, 4), (2, 4), (4, 6)]
    assert all(row.bytes and row.full_bytes for row in made)
    behind = history.read(versions[6], holding=versions[1])
    assert behind.version == str(versions[6].ref)
    history.read(versions[6])
    history.read(versions[5])


@pytest.mark.django_db(transaction=True)
def test_a_derivation_is_made_once_and_refused_for_other_weights(history):
    run = history.run()
    versions = [history.commit(run) for _ in range(2)]
    derivations_plan()
    PolicyVersion.objects.filter(pk=versions[1].pk).update(root="e" * 64)
    history.derive_all()
    row = Publication.objects.get(kind=PublicationKind.SKIP)
    assert row.published_at is None
    PolicyVersion.objects.filter(pk=versions[1].pk).update(root=versions[1].root)
    WorkUnit.objects.filter(ref=row.pk).update(state=WorkState.QUEUED, next_send_at=LONG_AGO)
    assert history.derive_all() == 1
    row.refresh_from_db()
    assert row.root == versions[1].root
    WorkUnit.objects.filter(ref=row.pk).update(state=WorkState.QUEUED, next_send_at=LONG_AGO)
    assert history.derive_all() == 1
    before = row.manifest_key
    row.refresh_from_db()
    assert row.manifest_key == before


@pytest.mark.django_db(transaction=True)
def test_serving_formats_follow_their_versions_as_deltas(history, settings):
    settings.SKIP_DELTAS, settings.SNAPSHOT_EVERY = [], 0
    settings.SERVING_FORMATS = [WeightFormat.MXFP4.value]
    run = history.run()
    versions = [run.lineage.head] + [history.commit(run) for _ in range(3)]
    while derivations_plan():
        assert history.derive_all()
    rows = Publication.objects.filter(format=WeightFormat.MXFP4).order_by("version__depth")
    assert [row.kind for row in rows] == ["snapshot", "delta", "delta", "delta"]
    assert [row.base_root for row in rows][1:] == [row.root for row in rows][:-1]
    served = history.read(versions[3], form=WeightFormat.MXFP4)
    alone = serving_weights(history.weights[versions[3].root], WeightFormat.MXFP4)
    assert {name: tensor.tolist() for name, tensor in served.tensors.items()} == {
        name: tensor.tolist() for name, tensor in alone.items()
    }


def _everybody_arrives(history):
    left = list(PolicyVersion.objects.filter(state=VersionState.COMMITTED, retired_at__isnull=True))
    assert set(versions_needed()) <= {version.pk for version in left}
    slots = ReplicaSlot.objects.exclude(current_version=None).select_related("current_version")
    holding = [slot.current_version for slot in slots]
    for version in left:
        history.read(version)
        for held in holding:
            history.read(version, holding=held)


def _commit(history, runs):
    open_runs = [run for run in runs if run.state == RunState.PENDING]
    if open_runs:
        history.commit(history.random.choice(open_runs))


def _target(history, runs):
    """A slot is told to hold some version, retired or not."""
    wanted = history.random.choice(list(PolicyVersion.objects.filter(state=VersionState.COMMITTED)))
    slot = ReplicaSlot.objects.order_by("?").first()
    with transaction.atomic():
        try:
            version_hold(wanted)
        except Conflict:
            assert wanted.retired_at is not None
            return
        ReplicaSlot.objects.filter(pk=slot.pk).update(desired_version=wanted)
        Transfer.objects.create(
            replica=slot.replica, slot=slot.slot, version=wanted, from_version_id=slot.current_version_id
        )


def _arrive(history, runs):
    ReplicaSlot.objects.exclude(desired_version=None).update(current_version=F("desired_version"))
    Transfer.objects.update(state=TransferState.DONE)


def _begin(history, runs):
    left = list(PolicyVersion.objects.filter(retired_at__isnull=True, state=VersionState.COMMITTED))
    if len(runs) < 5:
        runs.append(history.run(parent=history.random.choice([*left, None]), checkpoint_every=1))


def _end(history, runs):
    run = history.random.choice(runs)
    if len([run for run in runs if run.state == RunState.PENDING]) > 1:
        run.state = RunState.COMPLETED
        Run.objects.filter(pk=run.pk).update(state=run.state)


def _derive(history, runs):
    derivations_plan()
    history.derive_all()


def _collect(history, runs):
    """Twice, as without a grace period a mark is old enough at once."""
    garbage_collect(history.store)
    garbage_collect(history.store)


def _retire(history, runs):
    retire_versions()


EVENTS = [*[_commit] * 8, _target, _arrive, _begin, _end, _derive, _derive, _retire, _collect]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("history", [1, 2], indirect=True)
def test_every_reader_comes_to_every_version_that_is_left(history):
    """Nothing waits for a grace period here: what is let go is gone at the next collection."""
    runs = []
    _begin(history, runs)
    for _ in range(40):
        history.random.choice(EVENTS)(history, runs)
        Run.objects.update(checkpoint_step=1000)  # what trainers need is another test's
    for event in (_commit, _commit, _commit, _retire, _collect):
        event(history, runs)
    _everybody_arrives(history)
    assert PolicyVersion.objects.filter(retired_at__isnull=False).exists()
    gone = Publication.objects.filter(deleted_at__isnull=False)
    live = set(Publication.objects.filter(deleted_at__isnull=True).values_list("manifest_key", flat=True))
    assert gone.exists()
    assert not any(history.store.exists(row.manifest_key) for row in gone if row.manifest_key not in live)


def fp8(settings):
    """No skip-deltas and no snapshots, but each version in fp8."""
    settings.SKIP_DELTAS, settings.SNAPSHOT_EVERY, settings.SERVING_FORMATS = [], 0, ["fp8-block"]


def in_fp8(version):
    return Publication.objects.get(version=version, format=WeightFormat.FP8_BLOCK)


@pytest.mark.django_db(transaction=True)
def test_a_derivation_that_died_holds_nobody_up_and_can_be_replayed(history, settings):
    fp8(settings)
    run = history.run()
    derivations_plan()
    history.derive_all()
    bad = history.commit(run)
    derivations_plan()
    unit = WorkUnit.objects.get(ref=in_fp8(bad).pk)
    WorkUnit.objects.filter(pk=unit.pk).update(state=WorkState.DEAD)
    after, last = history.commit(run), history.commit(run)
    assert derivations_plan() == 1
    assert in_fp8(bad).deleted_at is not None
    assert "a publication of it is being made" not in versions_needed([bad.pk]).get(bad.pk, [])
    assert (in_fp8(after).kind, in_fp8(after).base_version) == (PublicationKind.SNAPSHOT, None)
    history.derive_all()
    assert derivations_plan() == 1
    assert (in_fp8(last).kind, in_fp8(last).base_version) == (PublicationKind.DELTA, after)
    work_replay(unit=WorkUnit.objects.get(pk=unit.pk), actor=TESTER, reason="the converter is mended")
    history.derive_all()
    assert (in_fp8(bad).deleted_at, in_fp8(bad).published_at is not None) == (None, True)


@pytest.mark.django_db(transaction=True)
def test_what_waits_for_its_base_does_not_keep_others_from_being_planned(history, settings, monkeypatch):
    fp8(settings)
    monkeypatch.setattr("controlplane.services.derivations.BATCH", 1)
    other = history.run()
    for _ in range(2):
        history.commit(other)
    while derivations_plan():
        history.derive_all()
    run = history.run()
    assert derivations_plan() == 1
    history.derive_all()
    first = history.commit(run)
    assert derivations_plan() == 1
    assert in_fp8(first).published_at is None
    history.commit(run)  # waits for `first`
    deeper = history.commit(other)
    assert derivations_plan() == 1
    assert in_fp8(deeper).kind == PublicationKind.DELTA


@pytest.mark.django_db(transaction=True)
def test_skips_from_retired_versions_do_not_keep_others_from_being_planned(history, settings, monkeypatch):
    settings.SKIP_DELTAS, settings.SNAPSHOT_EVERY = [2], 0
    monkeypatch.setattr("controlplane.services.derivations.BATCH", 1)
    run = history.run()
    versions = [run.lineage.head] + [history.commit(run) for _ in range(6)]
    PolicyVersion.objects.filter(pk=versions[2].pk).update(retired_at=LONG_AGO)
    assert [derivations_plan() for _ in range(3)] == [0, 1, 0]  # 2→4 is given up, 4→6 planned
    made = Publication.objects.filter(kind=PublicationKind.SKIP, deleted_at__isnull=True)
    assert {(row.base_version.depth, row.version.depth) for row in made} == {(4, 6)}
