"""A version goes out through the store, as files that are a model; what an attempt leaves, the next one takes."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.utils import timezone

from controlplane.celery import GRACE_S, TASK_TIME_LIMIT_S, VERSION_TIME_LIMIT_S, app
from controlplane.dispatch import ROUTES
from controlplane.errors import Conflict, Invalid
from controlplane.models import Event, Export, ExportPart, PolicyVersion, Publication, WorkUnit
from controlplane.selectors.exports import _store, exports_of, parts_of, pieces
from controlplane.selectors.stored_objects import unneeded
from controlplane.services.exports import export_delete, export_scratch, exports_expire, version_export
from controlplane.services.work import work_claim
from controlplane.states import EventType, ExportState, WorkKind, WorkState
from rl_core.delta import weights_root
from rl_core.formats import serving_weights
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from rl_core.types import WeightFormat
from tests.domain_factories import TESTER
from tests.thread_pools import watch
from tests.weight_history import WeightHistory
from workers import base, control
from workers.base import work_on
from workers.control import export
from workers.weights import bring_to, model_shadow

pytestmark = pytest.mark.django_db


@pytest.fixture
def history(tmp_path, settings):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    settings.STATE_DIR = tmp_path / "state"
    base.store.cache_clear()
    _store.cache_clear()
    yield WeightHistory(open_store(settings.STORE_URL), tmp_path / "model")
    base.store.cache_clear()
    _store.cache_clear()


@pytest.fixture
def version(history: WeightHistory) -> PolicyVersion:
    run = history.run()
    return [history.commit(run) for _ in range(2)][-1]


def asked(version: PolicyVersion, weight_format: WeightFormat = WeightFormat.BF16) -> Export:
    return version_export(version=version, weight_format=weight_format, actor=TESTER, reason="for a customer")


def unit_of(row: Export) -> WorkUnit:
    return WorkUnit.objects.get(kind=WorkKind.EXPORT, ref=row.pk)


def seen(row: Export) -> Export:
    return exports_of(row.version.lineage.project).get(pk=row.pk)


def downloaded(row: Export, folder: Path) -> Path:
    folder.mkdir()

    async def whole(parts: list[tuple[str, int]], end: int) -> bytes:
        return b"".join([piece async for piece in pieces(parts, start=0, end=end)])

    for file in row.files.all():
        content = asyncio.run(whole(parts_of(file), file.bytes))
        assert hashlib.sha256(content).hexdigest() == file.sha256
        (folder / file.name).write_bytes(content)
    return folder


@pytest.mark.parametrize("weight_format", [WeightFormat.BF16, WeightFormat.FP8_BLOCK])
def test_what_is_downloaded_is_the_version(history, version, tmp_path, monkeypatch, weight_format):
    monkeypatch.setattr(control, "PART_BYTES", 100)  # several parts to a file
    row = asked(version, weight_format)
    assert seen(row).state == ExportState.PENDING
    work_on(unit_of(row).pk, export)
    ready = seen(row)
    assert (ready.state, ready.error) == (ExportState.READY, "")
    assert {file.name for file in ready.files.all()} == {"config.json", "model.safetensors"}
    assert ready.bytes == sum(file.bytes for file in ready.files.all())
    assert ExportPart.objects.filter(file__name="model.safetensors").count() > 3
    weights = read_checkpoint(downloaded(ready, tmp_path / "out"))
    assert weights_root(weights) == weights_root(serving_weights(history.weights[version.root], weight_format))
    assert not export_scratch(row).exists()
    assert unit_of(row).state == WorkState.DONE


def test_asking_again_is_once_and_what_failed_is_tried_again(version):
    row = asked(version)
    assert asked(version) == row
    assert Event.objects.filter(type=EventType.EXPORT_CHANGED).count() == 1
    WorkUnit.objects.filter(pk=unit_of(row).pk).update(state=WorkState.DEAD, error="the disk is full")
    assert (seen(row).state, seen(row).error) == (ExportState.FAILED, "the disk is full")
    assert asked(version) == row
    assert unit_of(row).state == WorkState.QUEUED
    work_on(unit_of(row).pk, export)
    assert seen(row).state == ExportState.READY
    assert asked(version) == row
    assert asked(version, WeightFormat.MXFP4) != row


def test_what_cannot_be_exported_is_refused(history, version):
    PolicyVersion.objects.filter(pk=version.pk).update(retired_at=timezone.now())
    with pytest.raises(Conflict, match="retired"):
        asked(version)
    version.state = "publishing"
    with pytest.raises(Conflict, match="only a committed version"):
        asked(version)
    with pytest.raises(Invalid):
        version_export(version=version.parent, weight_format=WeightFormat.BF16, actor=TESTER, reason=" ")
    assert not Export.objects.exists()


def test_an_attempt_that_fails_leaves_no_folder(version):
    row = asked(version)
    Publication.objects.all().update(deleted_at=timezone.now())
    work_on(unit_of(row).pk, export)
    assert "nothing in the store leads" in seen(row).error
    assert seen(row).state == ExportState.FAILED
    assert not export_scratch(row).exists()


def test_a_later_attempt_takes_the_folder_that_an_earlier_one_left(version, monkeypatch):
    row = asked(version)
    left = export_scratch(row) / "model"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    work_on(unit_of(row).pk, export)
    assert [file.name for file in seen(row).files.all()] == ["config.json"]


@pytest.mark.parametrize("trouble", [SoftTimeLimitExceeded(), OSError("the store is away"), SystemExit(0)])
def test_an_attempt_that_fails_or_is_stopped_leaves_its_folder_to_the_next(version, monkeypatch, trouble):
    row, put = asked(version), control._put

    def fails(path, attempt):
        raise trouble

    monkeypatch.setattr(control, "_put", fails)
    with pytest.raises(SystemExit) if isinstance(trouble, SystemExit) else nullcontext():
        work_on(unit_of(row).pk, export)
    assert unit_of(row).state == WorkState.QUEUED
    left = {path.name for path in (export_scratch(row) / "model").iterdir()}
    assert left == {"config.json", "model.safetensors"}
    monkeypatch.setattr(control, "_put", put)
    monkeypatch.setattr("rl_core.delta.export.export_folder", None)  # nothing is written a second time
    WorkUnit.objects.update(next_send_at=timezone.now())
    work_on(unit_of(row).pk, export)
    assert seen(row).state == ExportState.READY
    assert not export_scratch(row).exists()


def test_what_was_written_by_half_is_written_anew(version, monkeypatch):
    row, put, there = asked(version), control._put, set()

    def looks(path, attempt):
        there.update(each.name for each in export_scratch(row).iterdir())
        return put(path, attempt)

    monkeypatch.setattr(control, "_put", looks)
    half = export_scratch(row) / ".part-x" / "model"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    work_on(unit_of(row).pk, export)
    assert there == {"model"}
    assert seen(row).state == ExportState.READY


def test_what_nobody_takes_up_goes_when_an_export_begins(history, version):
    waits, dead, gone = asked(version.parent), asked(version.parent, WeightFormat.MXFP4), uuid4()
    WorkUnit.objects.filter(pk=unit_of(dead).pk).update(state=WorkState.DEAD)
    exports = export_scratch(waits).parent
    for name in (waits.pk, dead.pk, gone):
        (exports / str(name) / "model").mkdir(parents=True)
    work_on(unit_of(asked(version)).pk, export)
    assert [path.name for path in exports.iterdir()] == [str(waits.pk)]
    export_delete(export=waits, actor=TESTER, reason="not wanted")
    work_on(unit_of(waits).pk, export)
    assert not any(exports.iterdir())


def test_what_goes_over_whole_versions_has_hours():
    for kind in WorkKind:
        task = app.tasks[ROUTES[kind].task]
        whole = kind in (WorkKind.EXPORT, WorkKind.DERIVE, WorkKind.TRAIN)
        assert task.time_limit == (VERSION_TIME_LIMIT_S if whole else TASK_TIME_LIMIT_S)
        assert task.soft_time_limit == task.time_limit - GRACE_S


def test_an_attempt_that_was_overtaken_leaves_the_folder_and_writes_no_row(version, monkeypatch):
    row, unit = asked(version), unit_of(asked(version))
    put = control._put

    def overtaken(path, attempt):
        if not row.files.exists():
            WorkUnit.objects.filter(pk=unit.pk).update(state=WorkState.QUEUED)
            assert work_claim(unit_id=unit.pk, worker="another") is not None
            attempt.lose()
        return put(path, attempt)

    monkeypatch.setattr(control, "_put", overtaken)
    work_on(unit.pk, export)
    assert (seen(row).state, seen(row).files.count()) == (ExportState.PENDING, 0)
    assert export_scratch(row).exists()


def test_a_deleted_export_is_gone_and_its_blobs_are_garbage(version):
    row = asked(version)
    work_on(unit_of(row).pk, export)
    keys = list(ExportPart.objects.values_list("blob_key", flat=True))
    assert not unneeded(keys)
    export_delete(export=row, actor=TESTER, reason="it was delivered")
    assert seen(row).state == ExportState.DELETED
    assert set(unneeded(keys)) == set(keys)
    with pytest.raises(Conflict):
        export_delete(export=row, actor=TESTER, reason="again")
    assert asked(version) != row


def test_one_deleted_while_it_is_written_stays_deleted(version, monkeypatch):
    row = asked(version)
    put = control._put

    def deleted(path, attempt):
        Export.objects.filter(pk=row.pk).update(deleted_at=timezone.now())
        return put(path, attempt)

    monkeypatch.setattr(control, "_put", deleted)
    work_on(unit_of(row).pk, export)
    assert (seen(row).state, seen(row).files.count()) == (ExportState.DELETED, 0)
    assert unit_of(row).state == WorkState.DONE


def test_exports_expire(version, settings):
    row = asked(version)
    work_on(unit_of(row).pk, export)
    settings.EXPORT_DAYS = 3
    assert exports_expire() == 0
    Export.objects.update(written_at=timezone.now() - timedelta(days=4))
    settings.EXPORT_DAYS = 0
    assert exports_expire() == 0
    settings.EXPORT_DAYS = 3
    assert exports_expire() == 1
    assert seen(row).state == ExportState.DELETED


def test_versions_are_decoded_and_hashed_on_as_many_threads_as_are_set(history, version, settings, monkeypatch):
    settings.UPDATE_THREADS = 3
    pools, row = watch(monkeypatch), asked(version)
    work_on(unit_of(row).pk, export)
    assert seen(row).state == ExportState.READY
    assert pools == {"leaves": [3], "decode": [3] * 2, "hash": [3] * 2}
    pools.clear()
    shadow = model_shadow(version)
    bring_to(shadow, version)
    assert shadow.root == version.root
    assert pools == {"leaves": [3], "decode": [3] * 2, "hash": [3] * 2}
