"""`manage.py export`: a version out as a folder, which is a model that can come in again."""

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane.models import ModelCard, PolicyVersion
from rl_core.delta import weights_root
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from tests.weight_history import WeightHistory

pytestmark = pytest.mark.django_db


def test_a_version_goes_out_and_comes_in_as_a_model(tmp_path, settings, capsys):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    history = WeightHistory(open_store(settings.STORE_URL), tmp_path / "model")
    run = history.run()
    version = [history.commit(run) for _ in range(2)][-1]
    out = tmp_path / "out"
    call_command("export", str(version.ref), "--folder", str(out))
    assert f"{version.ref} stands in {out}" in capsys.readouterr().out
    assert weights_root(read_checkpoint(out)) == version.root
    with pytest.raises(CommandError, match="exists; model folders are written once"):
        call_command("export", str(version.ref), "--folder", str(out))
    call_command("add", "model", "again", "--project", history.project.slug, "--folder", str(out))
    card = ModelCard.objects.get(slug="again")
    assert card.root == version.root
    first = history.run(parent=version).lineage.head
    assert first.root == card.root


def test_what_is_not_there_is_refused(tmp_path, settings):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    history = WeightHistory(open_store(settings.STORE_URL), tmp_path / "model")
    version = history.commit(history.run())
    with pytest.raises(CommandError, match="no version"):
        call_command("export", "nobody:0-1", "--folder", str(tmp_path / "out"))
    version.publications.update(deleted_at=timezone.now())
    PolicyVersion.objects.filter(pk=version.pk).update(retired_at=timezone.now())
    with pytest.raises(CommandError, match="nothing in the store leads"):
        call_command("export", str(version.ref), "--folder", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
