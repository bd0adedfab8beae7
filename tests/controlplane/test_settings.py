"""Settings: the secret key, made once by whoever starts first and whole from the beginning, and counts above 0."""

import runpy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane import settings as module
from controlplane.env import Env


@pytest.fixture
def state(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "STATE_DIR", tmp_path / "var")
    monkeypatch.setattr(module, "env", Env({}))
    return tmp_path / "var"


def test_processes_that_start_at_once_have_the_same_key(state, monkeypatch):
    make = module.secrets.token_urlsafe

    def slowly(length: int) -> str:
        time.sleep(0.2)
        return make(length)

    monkeypatch.setattr(module.secrets, "token_urlsafe", slowly)
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: module._secret_key(), range(8)))
    assert keys == {(state / "secret_key").read_text()}
    assert len(keys.pop()) >= 50
    assert [path.name for path in state.iterdir()] == ["secret_key"]
    assert (state / "secret_key").stat().st_mode & 0o777 == 0o600


def test_an_empty_key_is_named_and_not_replaced(state):
    state.mkdir()
    (state / "secret_key").touch()
    with pytest.raises(ImproperlyConfigured, match="secret_key is empty"):
        module._secret_key()
    assert (state / "secret_key").read_text() == ""


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(state, monkeypatch):
    def full(length: int) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.secrets, "token_urlsafe", full)
    with pytest.raises(OSError, match="No space"):
        module._secret_key()
    assert list(state.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["TRAINER_THREADS", "ENGINE_THREADS", "UPDATE_THREADS", "ENGINE_MAX_SEQS", "DATABASE_POOL"]
)
def test_counts_below_1_are_refused(monkeypatch, tmp_path, name):
    monkeypatch.setenv("SLIPWAY_STATE", str(tmp_path))
    monkeypatch.setenv(name, "1")
    runpy.run_path(module.__file__)
    monkeypatch.setenv(name, "0")
    with pytest.raises(ImproperlyConfigured, match=f"{name} must be a whole number above 0, not '0'"):
        runpy.run_path(module.__file__)
