"""The way in: guesses have a bound, by name and by address."""

from __future__ import annotations

import uuid

import pytest
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from controlplane.models import User
from frontend.forms import login as form

pytestmark = pytest.mark.django_db
PASSWORD = "the right one, and long"


def address() -> str:
    """One of its own: buckets outlive a test."""
    return f"fd00::{uuid.uuid4().hex[:4]}:{uuid.uuid4().hex[:4]}:{uuid.uuid4().hex[:4]}"


def post(name: str, password: str, *, here: str) -> HttpResponse:
    return Client(REMOTE_ADDR=here).post(reverse("login"), {"username": name, "password": password})


@pytest.fixture
def name() -> str:
    return User.objects.create_user(f"ann-{uuid.uuid4().hex[:8]}", password=PASSWORD).username


def test_after_so_many_wrong_passwords_a_minute_the_right_one_has_to_wait_too(name, monkeypatch) -> None:
    monkeypatch.setattr(form, "HERE", 2)
    here = address()
    for _ in range(2):
        assert post(name, "wrong", here=here).status_code == 200
    refused = post(name, PASSWORD, here=here)
    assert refused.status_code == 429
    assert 0 < int(refused.headers["Retry-After"]) <= 60
    assert "Too many wrong tries" in refused.content.decode()
    assert post(name, PASSWORD, here=address()).status_code == 302  # its owner, elsewhere


def test_right_passwords_use_nothing_up(name, monkeypatch) -> None:
    monkeypatch.setattr(form, "HERE", 2)
    here = address()
    for _ in range(4):
        assert post(name, PASSWORD, here=here).status_code == 302


def test_an_address_that_tries_many_names_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(form, "ADDRESS", 2)
    here = address()
    answers = [post(uuid.uuid4().hex, "wrong", here=here).status_code for _ in range(3)]
    assert answers == [200, 200, 429]


def test_a_name_that_is_tried_from_everywhere_is_bounded(name, monkeypatch) -> None:
    monkeypatch.setattr(form, "NAME", 2)
    answers = [post(name, "wrong", here=address()).status_code for _ in range(3)]
    assert answers == [200, 200, 429]
