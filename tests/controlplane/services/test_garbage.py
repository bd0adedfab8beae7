"""Garbage collection: only what no row names goes, only after its time, whoever collects and whoever is killed."""

import re
import threading
from datetime import timedelta

import pytest
from django.db import connection, models, transaction
from django.db.models import F

from controlplane import models as tables
from controlplane.models import Garbage, PolicyVersion, Publication, Rollout
from controlplane.selectors.stored_objects import BLOB_COLUMNS, unneeded
from controlplane.services import garbage
from controlplane.services.blobs import blob_put
from controlplane.services.garbage import garbage_collect, garbage_found, store_time
from controlplane.services.versions import version_begin, version_commit
from controlplane.states import PublicationKind, VersionState
from rl_core.errors import ObjectMissing
from rl_core.store import ObjectStore, blob_key, open_store
from tests.domain_factories import TESTER, make_group, make_run
from tests.weight_history import WeightHistory

GRACE_S = 3600


@pytest.fixture
def store(tmp_path, settings):
    settings.GARBAGE_GRACE_S = GRACE_S
    return open_store(tmp_path / "store")


class Later:
    """A store whose clock says that everything was written `by` earlier, but for the clock's own object."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.by = timedelta()
        self._written = set()  # while others look, too

    def __getattr__(self, name):
        return getattr(self._store, name)

    def _older(self, info):
        return type(info)(info.key, info.size_bytes, info.modified - self.by)

    def list(self, prefix=""):
        return map(self._older, self._store.list(prefix))

    def put(self, key, data):
        self._store.put(key, data)
        self._written.add(key)

    def head(self, key):
        info = self._store.head(key)
        return info if key in self._written and key.startswith("clock/") else self._older(info)


def wait(store, seconds):
    """Let time pass, for the store and for the marks."""
    store.by += timedelta(seconds=seconds)
    Garbage.objects.update(marked_at=F("marked_at") - timedelta(seconds=seconds))


def keys(store):
    return {info.key for info in store.list()}


def folders(found):
    """The publications that the keys belong to."""
    return {re.split("/manifest.json|/segments/", key)[0] for key in found}


def test_every_column_that_names_a_blob_is_known():
    named = {
        (model, field.name)
        for model in vars(tables).values()
        if isinstance(model, type) and issubclass(model, models.Model) and not model._meta.abstract
        for field in model._meta.get_fields()
        if isinstance(field, models.CharField) and field.name.endswith("_key") and field.max_length == 300
    }
    others = {field for field in named if field[1] in ("manifest_key", "snapshot_key")}
    assert named - others == set(BLOB_COLUMNS)


@pytest.mark.django_db
def test_a_blob_goes_once_it_and_its_mark_are_old_and_not_before(store):
    late = Later(store)
    key = store.put_blob(b"left by a killed attempt")
    assert garbage_collect(late).marked == 0  # younger than the grace period
    wait(late, GRACE_S + 1)
    assert (garbage_collect(late).marked, keys(store)) == (1, {key})
    wait(late, GRACE_S - 1)
    assert (garbage_collect(late).deleted, keys(store)) == (0, {key})
    wait(late, 2)
    found = garbage_collect(late)
    assert (found.deleted, found.deleted_bytes, keys(store)) == (1, 24, set())
    assert not Garbage.objects.exists()


@pytest.mark.django_db
def test_what_came_into_use_after_it_was_marked_is_unmarked(store):
    late = Later(store)
    key = store.put_blob(b"adopted late")
    wait(late, GRACE_S + 1)
    garbage_collect(late)
    rollout = Rollout.objects.create(group=make_group(make_run()), attempt=0, trajectory_key=key)
    wait(late, GRACE_S + 1)
    found = garbage_collect(late)
    assert (found.deleted, found.unmarked, keys(store)) == (0, 1, {key})
    rollout.delete()
    garbage_collect(late)
    wait(late, GRACE_S + 1)
    assert garbage_collect(late).deleted == 1


@pytest.mark.django_db
def test_whoever_stores_a_blob_again_takes_its_mark_away(store):
    late = Later(store)
    key = store.put_blob(b"the same bytes")
    wait(late, GRACE_S + 1)
    garbage_collect(late)
    wait(late, GRACE_S + 1)
    assert blob_put(store, b"the same bytes") == key
    assert garbage_collect(late).deleted == 0
    assert Garbage.objects.get().key == key  # marked anew: the whole grace period is ahead of it


@pytest.mark.django_db
def test_an_object_that_was_written_again_since_its_mark_is_left(store):
    late = Later(store)
    key = store.put_blob(b"written again")
    wait(late, GRACE_S + 1)
    garbage_collect(late)
    wait(late, GRACE_S + 1)
    late.by = timedelta()  # deleted by hand, and written again just now
    found = garbage_collect(late)
    assert (found.deleted, found.unmarked, keys(store)) == (0, 1, {key})


@pytest.mark.django_db
def test_objects_outside_our_folders_are_nobodys_business(store):
    late = Later(store)
    store.put("elsewhere/notes.txt", b"mine")
    store.put("lineages/readme.txt", b"not of a publication")
    wait(late, 10 * GRACE_S)
    assert garbage_collect(late).marked == 0


@pytest.mark.django_db(transaction=True)
def test_of_a_version_only_what_its_commit_names_is_kept(store, tmp_path):
    """Attempts that were overtaken, versions that were given up; what is being published just now stays."""
    history = WeightHistory(store, tmp_path / "model")
    late = Later(store)
    run = history.run()
    head = run.lineage.head
    older = version_begin(lineage=run.lineage, epoch=0, number=1, parent=head, fence=1)
    history.publish(older, fence=1)
    begun = version_begin(lineage=run.lineage, epoch=0, number=1, parent=head, fence=2)
    wait(late, GRACE_S + 1)
    weights = history.publish(begun, fence=2)
    prefix = f"lineages/{run.lineage_id}/0-1"
    assert folders(unneeded(keys(store))) == {f"{prefix}/1"}
    version = version_commit(version=begun, fence=2, weights=weights, run=run, actor=TESTER)
    given_up = version_begin(lineage=run.lineage, epoch=0, number=2, parent=version, fence=3)
    history.publish(given_up, fence=3)
    PolicyVersion.objects.filter(pk=given_up.pk).update(state=VersionState.ABANDONED)
    reasons = unneeded(keys(store))
    assert folders(reasons) == {f"lineages/{run.lineage_id}/0-2/3", f"{prefix}/1"}
    assert "not committed" in reasons[f"{prefix}/1/manifest.json"]
    garbage_collect(late)
    wait(late, GRACE_S + 1)
    assert garbage_collect(late).deleted == 4
    history.read(version)


@pytest.mark.django_db(transaction=True)
def test_a_publication_that_is_let_go_is_read_to_its_end(store, tmp_path):
    history = WeightHistory(store, tmp_path / "model")
    late = Later(store)
    run = history.run()
    version = history.commit(run)
    wait(late, 10 * GRACE_S)
    row = version.publications.get()
    Publication.objects.filter(pk=row.pk).update(deleted_at="2026-01-01T00:00Z")
    garbage_collect(late)
    assert store.exists(row.manifest_key)
    wait(late, GRACE_S + 1)
    garbage_collect(late)
    assert not store.exists(row.manifest_key)


@pytest.mark.django_db(transaction=True)
def test_a_publication_under_way_is_kept_and_a_dead_attempt_at_it_is_not(store, tmp_path):
    history = WeightHistory(store, tmp_path / "model")
    version = history.commit(history.run())
    row = Publication.objects.create(version=version, kind=PublicationKind.SNAPSHOT)
    folder = f"lineages/{version.lineage_id}/0-1/derived-{row.pk}"
    for fence in (1, 2):
        store.put(f"{folder}/{fence}/segments/0000", b"half")
    assert unneeded(keys(store)) == {}
    Publication.objects.filter(pk=row.pk).update(
        published_at="2026-01-01T00:00Z", root="a" * 64, manifest_key=f"{folder}/2/manifest.json"
    )
    assert list(unneeded(keys(store))) == [f"{folder}/1/segments/0000"]
    store.put(f"{folder}/2/parts/0/manifest.json", b"of a part")
    assert list(unneeded(keys(store))) == [f"{folder}/1/segments/0000"]


@pytest.mark.django_db
def test_a_look_says_what_would_go_and_writes_nothing(store):
    late = Later(store)
    store.put_blob(b"one")
    wait(late, GRACE_S + 1)
    (seen,) = garbage_found(late)
    assert (seen.info.size_bytes, seen.reason, seen.marked_at, seen.due) == (3, "no row names this blob", None, False)
    assert not Garbage.objects.exists()
    garbage_collect(late)
    wait(late, GRACE_S + 1)
    (seen,) = garbage_found(late)
    assert seen.due
    assert len(keys(store)) == 1


@pytest.mark.django_db
@pytest.mark.parametrize("dies_after", range(7))
def test_a_collector_that_is_killed_leaves_what_the_next_one_finishes(store, dies_after, monkeypatch):
    """It dies after each of its deletions in turn, inside the transaction that holds the marks."""
    late = Later(store)
    kept = store.put_blob(b"kept")
    Rollout.objects.create(group=make_group(make_run()), attempt=0, session_key=kept)
    for number in range(6):
        store.put_blob(bytes([number]))
    wait(late, GRACE_S + 1)
    garbage_collect(late)
    wait(late, GRACE_S + 1)
    monkeypatch.setattr(garbage, "DELETED", 4)
    done = []

    class Killed(BaseException):
        pass

    def delete(key):
        if key.startswith("blobs/"):
            if len(done) == dies_after:
                raise Killed
            done.append(key)
        store.delete(key)

    late.delete = delete
    if dies_after < 6:
        with pytest.raises(Killed), transaction.atomic():
            garbage_collect(late)
        assert kept in keys(store)
        assert len(keys(store)) == 7 - dies_after
    late.delete = store.delete
    garbage_collect(late)
    assert keys(store) == {kept}
    assert not Garbage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_collectors_side_by_side_and_a_writer_between_them(store, settings):
    """Each blob is deleted once; a writer that wants one back while it is being deleted waits, and writes it again."""
    late = Later(store)
    wanted = b"wanted again"
    for data in [wanted, *[bytes([n]) * 9 for n in range(40)]]:
        store.put_blob(data)
    wait(late, GRACE_S + 1)
    garbage_collect(late)
    wait(late, GRACE_S + 1)
    deleting, deleted = threading.Event(), []

    def delete(key):
        if key == blob_key(wanted):
            deleting.set()
            threading.Event().wait(0.3)  # the writer comes now
        store.delete(key)
        deleted.append(key)

    late.delete = delete
    found = []

    def collect():
        found.append(garbage_collect(late).deleted)
        connection.close()

    def write():
        assert deleting.wait(10)
        blob_put(store, wanted)
        connection.close()

    threads = [threading.Thread(target=run) for run in (collect, collect, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    blobs = [key for key in deleted if key.startswith("blobs/")]
    assert sum(found) == len(blobs) == len(set(blobs)) == 41
    assert keys(store) == {blob_key(wanted)}


@pytest.mark.django_db
def test_the_stores_clock_leaves_nothing_behind(store):
    assert store_time(store).tzinfo is not None
    assert keys(store) == set()
    with pytest.raises(ObjectMissing):
        store.head("clock/none")


@pytest.mark.django_db(transaction=True)
def test_what_a_kill_left_of_asking_the_store_goes(store):
    for key in ("clock/left", "probes/left", "elsewhere/left"):
        store.put(key, b"1")
    late = Later(store)
    wait(late, GRACE_S + 1)
    assert garbage_collect(late).marked == 2
    assert {one.reason for one in garbage_found(late)} == {"left by a process that was killed"}
    wait(late, GRACE_S + 1)
    assert garbage_collect(late).deleted == 2
    assert keys(store) == {"elsewhere/left"}
