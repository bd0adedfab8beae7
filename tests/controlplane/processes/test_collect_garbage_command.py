"""`manage.py collect_garbage`: says what would go and why, and does it."""

import pytest
from django.core.management import call_command

from controlplane.models import PolicyVersion, Run
from controlplane.states import RunState
from rl_core.store import open_store
from tests.weight_history import WeightHistory


@pytest.mark.django_db
def test_a_dry_run_tells_and_a_run_does(tmp_path, settings, capsys, monkeypatch):
    settings.STORE_URL, settings.GARBAGE_GRACE_S = (tmp_path / "store").as_uri(), 0
    store = open_store(settings.STORE_URL)
    history = WeightHistory(store, tmp_path / "model")
    run = history.run()
    middle = history.commit(run)
    history.commit(run)
    Run.objects.filter(pk=run.pk).update(state=RunState.COMPLETED)
    blob = store.put_blob(b"left behind")

    def collect(*words):
        call_command("collect_garbage", *words)
        return capsys.readouterr().out

    said = collect("--dry-run")
    assert f"would retire  {middle.ref}  nobody needs its weights" in said
    assert f"would mark    {blob}  11 bytes  no row names this blob" in said
    assert store.exists(blob)
    assert not PolicyVersion.objects.filter(retired_at__isnull=False).exists()
    assert "1 object(s) marked, 0 unmarked, 1 deleted (0.0 MB)" in collect()
    assert not store.exists(blob)
    assert PolicyVersion.objects.get(pk=middle.pk).retired_at is not None
    history.read(run.lineage.versions.get(number=2))
