"""`manage.py add`: a project of one's own, without the demonstration."""

import stat

import pytest
from django.core.management import CommandError, call_command

from controlplane.models import Cluster, Event, Membership, ModelCard, Project, Replica, User
from tests.domain_factories import make_model
from tests.loop_rig import tiny_model

pytestmark = pytest.mark.django_db


@pytest.fixture
def add(settings, tmp_path, capsys):
    """Runs the command over a store and token folder of its own; returns what it printed."""
    settings.STORE_URL = f"file://{tmp_path / 'store'}"
    settings.REPLICA_TOKEN_DIR = tmp_path / "tokens"

    def run(line):
        call_command("add", *line.split())
        return capsys.readouterr().out

    return run


def test_from_nothing_to_a_replica_of_a_model_of_ones_own(add, tmp_path):
    folder = tiny_model(tmp_path / "model")
    said = add("project acme --name Acme --owner ada")
    password = said.partition(" / ")[2].split()[0]
    assert User.objects.get(username="ada").check_password(password)
    assert Membership.objects.get(project__slug="acme").role == "owner"
    said = add(f"model ours --project acme --folder {folder}")
    card = ModelCard.objects.get(project__slug="acme")
    assert (card.slug, card.folder) == ("ours", str(folder))
    assert card.root in said
    add("cluster eu --project acme --model ours --role rollout --region eu-west --capacity 8")
    said = add(
        "replica eu-1 --project acme --cluster eu --weight-slots 2"
        " --inference-url http://engine-1:8001 --control-url http://engine-1:8002"
    )
    replica = Replica.objects.get(cluster__slug="eu")
    assert (replica.inference_url, replica.slots.count()) == ("http://engine-1:8001", 2)
    for kind in ("inference", "control"):
        path = tmp_path / "tokens" / f"{replica.pk}.{kind}"
        assert f"--{kind}-token-file   {path}" in said
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text() not in said
    types = set(Event.objects.filter(project__slug="acme").values_list("type", flat=True))
    assert {"project.created", "model.registered", "cluster.created", "replica.registered"} <= types


def test_a_local_cluster_says_by_itself_where_it_listens(add):
    add("project acme --owner ada")
    make_model(Project.objects.get(), slug="ours")
    add("cluster here --project acme --model ours --role serving --region here --capacity 8 --local")
    assert "`manage.py up` starts its engine" in add("replica here-1 --project acme --cluster here")
    assert Cluster.objects.get().local
    with pytest.raises(CommandError, match="is local"):
        add("replica here-2 --project acme --cluster here --inference-url http://a:1 --control-url http://a:2")


def test_an_owner_who_is_there_keeps_their_password(add):
    add("project one --owner ada")
    digest = User.objects.get().password
    assert "log in" not in add("project two --owner ada")
    assert User.objects.get().password == digest
    assert Membership.objects.count() == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("project acme --owner eve", "there is a project acme already"),
        ("project other --owner a/b", "Enter a valid username"),
        ("project Ünsafe/slug --owner eve", "valid"),
        ("model ours --project nowhere --folder /tmp", "no project 'nowhere'; add it"),
        ("model ours --project acme --folder /nowhere", "is no model folder"),
        ("cluster eu --project acme --model none --role rollout --region eu --capacity 8", "no model 'none'; add it"),
        ("replica eu-1 --project acme --cluster none", "no cluster 'none'"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(add, line, message):
    add("project acme --owner ada")
    with pytest.raises(CommandError, match=message):
        add(line)
    assert Project.objects.count() == 1
    assert User.objects.count() == 1
    assert not ModelCard.objects.exists()


@pytest.mark.parametrize("url", ["", "engine-1:8001", "ftp://engine-1", "http://", "http://user:secret@engine-1"])
def test_addresses_that_are_none_are_refused(add, url):
    add("project acme --owner ada")
    make_model(Project.objects.get(), slug="ours")
    add("cluster eu --project acme --model ours --role rollout --region eu --capacity 8")
    with pytest.raises(CommandError, match="not a URL"):
        add(f"replica eu-1 --project acme --cluster eu --control-url http://engine-1:8002 --inference-url={url}")
    assert not Replica.objects.exists()
