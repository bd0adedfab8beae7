"""Embedded services against the real servers: starting, stopping, and what crashes and people leave behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import psycopg
import pytest
import redis

from controlplane.processes.errors import ServiceFailed
from controlplane.processes.postgres import Postgres
from controlplane.processes.services import (
    ServiceUrls,
    services_start,
    services_status,
    services_stop,
    services_stopped_on_purpose,
)
from controlplane.processes.valkey import Valkey


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("services")
    yield folder
    services_stop(folder)


def pid_of(state: Path, name: str) -> int:
    pid = next(service.pid for service in services_status(state) if service.name == name)
    assert pid is not None
    return pid


def remember(url: str, word: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS memory (word text)")
        connection.execute("INSERT INTO memory VALUES (%s)", [word])


def remembered(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute("SELECT word FROM memory")}


def test_start_is_idempotent_and_private(state):
    first = services_start(state)
    pids = [service.pid for service in services_status(state)]
    assert services_start(state) == first
    assert [service.pid for service in services_status(state)] == pids
    assert (state / "services.json").stat().st_mode & 0o777 == 0o600
    assert (state / "postgres").stat().st_mode & 0o777 == 0o700
    assert msgspec.json.decode((state / "services.json").read_bytes(), type=ServiceUrls) == first


def test_passwords_are_required_and_commits_are_durable(state):
    urls = services_start(state)
    with psycopg.connect(urls.database_url) as connection:
        for setting, value in {"fsync": "on", "synchronous_commit": "on", "listen_addresses": "127.0.0.1"}.items():
            assert connection.execute(f"SHOW {setting}").fetchone() == (value,)
    wrong = urls.database_url.replace(urls.database_url.split(":")[2].split("@")[0], "wrong")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url("redis://" + urls.redis_url.split("@")[1]).ping()


def test_data_survive_stop_and_kill(state):
    urls = services_start(state)
    remember(urls.database_url, "stopped")
    assert sorted(services_stop(state)) == ["postgres", "valkey"]
    assert all(service.pid is None for service in services_status(state))
    assert services_start(state) == urls
    remember(urls.database_url, "killed")
    os.kill(pid_of(state, "postgres"), signal.SIGKILL)
    os.kill(pid_of(state, "valkey"), signal.SIGKILL)
    time.sleep(0.1)
    assert services_start(state) == urls
    assert {"stopped", "killed"} <= remembered(urls.database_url)


def test_a_reused_process_number_is_not_taken_for_the_server(state):
    urls = services_start(state)
    services_stop(state)
    # An unrelated process of the server's own user: PostgreSQL alone would refuse to start beside it.
    user = ["setpriv", "--reuid=nobody", "--clear-groups"] if os.geteuid() == 0 else []
    with subprocess.Popen([*user, "sleep", "60"]) as other:
        lock = state / "postgres" / "data" / "postmaster.pid"
        lock.write_text(
            f"{other.pid}\n{lock.parent}\n{int(time.time())}\n5432\n\n127.0.0.1\n         0         0\nready\n"
        )
        (state / "services" / "valkey.json").write_text(f'{{"pid": {other.pid}, "born": {time.time()}}}')
        assert all(service.pid is None for service in services_status(state))
        assert services_start(state) == urls
        assert other.poll() is None
        other.kill()


def test_a_damaged_address_file_is_mended_with_new_passwords(state):
    before = services_start(state)
    remember(before.database_url, "kept")
    (state / "services.json").write_text('{"database_url": "postgr')
    after = services_start(state)
    assert after.database_url != before.database_url
    assert "kept" in remembered(after.database_url)
    redis.Redis.from_url(after.redis_url).ping()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(before.database_url)


def test_a_taken_port_is_left_to_its_holder(state):
    before = services_start(state)
    services_stop(state)
    port = int(before.database_url.rsplit(":", 1)[1].split("/")[0])
    with socket.create_server(("127.0.0.1", port)):
        after = services_start(state)
    assert f":{port}/" not in after.database_url
    assert remembered(after.database_url)


@pytest.mark.parametrize("lost", [Postgres, Valkey])
def test_a_port_lost_between_choice_and_start_is_replaced(state, monkeypatch, lost):
    before = services_start(state)
    remember(before.database_url, "kept")
    services_stop(state)
    start, holders = lost.start, []

    def start_too_late(self, *, port, **options):
        if not holders:
            holders.append(socket.create_server(("127.0.0.1", port)))
        start(self, port=port, **options)

    monkeypatch.setattr(lost, "start", start_too_late)
    after = services_start(state)
    holders.pop().close()
    assert after != before
    assert "kept" in remembered(after.database_url)
    redis.Redis.from_url(after.redis_url).ping()
    assert not list(state.glob("valkey.broken-*"))


def test_broken_broker_data_are_moved_aside(state):
    services_start(state)
    services_stop(state)
    for file in (state / "valkey").rglob("*.manifest"):
        file.write_text("nonsense\n")
    urls = services_start(state)
    redis.Redis.from_url(urls.redis_url).ping()
    assert list(state.glob("valkey.broken-*"))


def test_keep_starts_again_what_died_but_not_what_was_stopped(state):
    services_start(state)
    code = (
        "import sys; from pathlib import Path; from controlplane.processes.services import services_keep;"
        "services_keep(Path(sys.argv[1]), say=print, every_s=0.2)"
    )
    keeper = subprocess.Popen([sys.executable, "-c", code, str(state)], stdout=subprocess.DEVNULL)
    try:
        dead = pid_of(state, "valkey")
        os.kill(dead, signal.SIGKILL)
        deadline = time.monotonic() + 20
        found = [dead]
        while (None in found or dead in found) and time.monotonic() < deadline:
            time.sleep(0.1)
            found = [service.pid for service in services_status(state)]
        assert None not in found
        assert dead not in found
        services_stop(state)
        time.sleep(1)
        assert services_stopped_on_purpose(state)
        assert all(service.pid is None for service in services_status(state))
    finally:
        keeper.kill()
        keeper.wait()


def test_two_starters_agree(tmp_path):
    results = []
    threads = [threading.Thread(target=lambda: results.append(services_start(tmp_path))) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 3
        assert len(set(results)) == 1
    finally:
        services_stop(tmp_path)


def test_a_start_that_was_cut_off_is_begun_again(tmp_path):
    partial = tmp_path / "postgres" / "data.partial"
    partial.mkdir(parents=True)
    (partial / "rubble").write_text("x")
    try:
        services_start(tmp_path)
        assert not partial.exists()
    finally:
        services_stop(tmp_path)


def test_a_folder_that_is_no_cluster_is_left_alone(tmp_path):
    foreign = tmp_path / "postgres" / "data" / "thesis.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("years of work")
    with pytest.raises(ServiceFailed, match="no PostgreSQL cluster"):
        services_start(tmp_path)
    services_stop(tmp_path)
    assert foreign.read_text() == "years of work"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts servers as another user")
def test_root_works_under_a_closed_parent_without_opening_it(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    state = closed / "state"
    try:
        urls = services_start(state)
        remember(urls.database_url, "inside")
        assert closed.stat().st_mode & 0o777 == 0o700
        services_stop(state)
        services_start(state)
        assert "inside" in remembered(urls.database_url)
        uid = Path(f"/proc/{pid_of(state, 'postgres')}").stat().st_uid
        assert uid != 0
    finally:
        services_stop(state)


def test_no_space_is_said(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tiny file system")
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m,mode=755", "tmpfs", small], capture_output=True)
    if done.returncode != 0:
        pytest.skip("this container allows no mounts")
    try:
        with pytest.raises(ServiceFailed, match=r"(?s)No space left.*free space"):
            services_start(small)
    finally:
        services_stop(small)
        subprocess.run(["umount", small], check=True)
