"""`manage.py add`: a project of one's own, without the demonstration."""

import stat
import threading
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

from controlplane.models import (
    Cluster,
    Event,
    Garbage,
    Membership,
    ModelCard,
    Project,
    RemoteEnvironment,
    Replica,
    RubricVersion,
    User,
)
from controlplane.selectors.environments import environment_of, remote_of
from rl_core.environments.remote.server import RemoteServer, serving
from rl_core.store import open_store
from tests.domain_factories import make_model, make_project
from tests.loop_rig import tiny_model
from tests.rl_core.environments.remote.customers import SECRET, Asker, Counter

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


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    return path


def test_a_remote_environment_is_asked_and_registered_with_its_rubric(add, secret):
    add("project acme --owner ada")
    with serving(RemoteServer(Asker(), secret=SECRET)) as url:
        said = add(f"environment shop --project acme --remote {url} --secret-file {secret} --session-seconds 60")
        assert f"a remote environment at {url}" in said
        add(f"environment shop --project acme --remote {url} --secret-file {secret} --title Shop")
    row = RemoteEnvironment.objects.get()
    assert (row.title, row.kind, row.url, row.session_s) == ("Shop", "environment", url, 1800)
    assert SECRET not in str(vars(row))
    assert remote_of(row).place.secret == SECRET
    (criterion,) = RubricVersion.objects.get(rubric__slug="shop").criteria
    assert (criterion["kind"], criterion["weight"]) == ("reported", 1.0)
    assert Event.objects.filter(type="environment.registered", data__slug="shop").count() == 2
    assert SECRET not in str(list(Event.objects.values_list("data", flat=True)))


def test_a_remote_world_brings_its_tools(add, secret):
    add("project acme --owner ada")
    with serving(RemoteServer(Counter(), secret=SECRET)) as url:
        add(f"environment count --project acme --remote {url} --secret-file {secret}")
    environment = environment_of(Project.objects.get().pk, "count")
    assert [tool.name for tool in environment.tools] == ["add"]
    assert environment_of(make_project().pk, "count") is None
    assert not RubricVersion.objects.exists()


def test_what_is_no_remote_is_refused(add, secret, tmp_path):
    add("project acme --owner ada")
    other = tmp_path / "other"
    other.write_text("whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=")
    strange = Counter()
    strange.tools = [{"name": "add", "parameters": {"type": "nonsense"}}]
    with serving(RemoteServer(Asker(), secret=SECRET)) as url, serving(RemoteServer(strange, secret=SECRET)) as odd:
        for line, match in [
            (f"word-problems --remote {url} --secret-file {secret}", "ships"),
            (f"shop --remote {url} --secret-file {other}", "another secret"),
            (f"shop --remote {url} --secret-file {tmp_path / 'nothing'}", "does not read"),
            (f"shop --remote {url} --secret-file {secret} --session-seconds 1", "10 to 86400 seconds"),
            (f"shop --remote http://127.0.0.1:9/ --secret-file {secret}", "did not answer"),
            (f"shop --remote ftp://host/ --secret-file {secret}", "http"),
            (f"shop --remote {odd} --secret-file {secret}", "cannot be used"),
        ]:
            with pytest.raises(CommandError, match=match):
                add(f"environment {line} --project acme")
    (tmp_path / "none").write_text("no secret")
    with pytest.raises(CommandError, match="secret"):
        add(f"environment shop --project acme --remote {url} --secret-file {tmp_path / 'none'}")
    assert not RemoteEnvironment.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_model_whose_weights_a_collector_deletes_just_now_is_written_again(add, tmp_path, settings):
    folder = tiny_model(tmp_path / "model")
    add("project acme --owner ada")
    add(f"model ours --project acme --folder {folder}")
    store, card = open_store(settings.STORE_URL), ModelCard.objects.get()
    ModelCard.objects.all().delete()  # nothing names the weights any more
    there = {info.key for info in store.list("snapshots")}
    Garbage.objects.bulk_create(Garbage(key=key, bytes=1, reason="test") for key in there)
    locked = threading.Event()

    def collect():
        with transaction.atomic():
            list(Garbage.objects.select_for_update())
            locked.set()
            while not _waited_for():
                time.sleep(0.02)
            for key in there:
                store.delete(key)
            Garbage.objects.all().delete()
        connections.close_all()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    assert locked.wait(60)
    add(f"model ours --project acme --folder {folder}")
    collector.join()
    assert ModelCard.objects.get().manifest_key == card.manifest_key
    assert {info.key for info in store.list("snapshots")} == there


def _waited_for():
    """Whether somebody's transaction waits for a lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return cursor.fetchone()[0] > 0
