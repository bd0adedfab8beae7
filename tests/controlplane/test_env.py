"""Settings that do not parse stop the start, naming the variable."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane.env import Env


def test_networks_are_read_and_none_is_the_default():
    env = Env({"NETWORKS": "127.0.0.0/8, fd00::/8"})
    assert env.networks("NETWORKS") == [ip_network("127.0.0.0/8"), ip_network("fd00::/8")]
    assert env.networks("OTHERS") == []


@pytest.mark.parametrize("text", ["10.0.0.1/8", "localhost", "10.0.0.0/99"])
def test_a_network_that_does_not_parse_names_the_variable(text):
    with pytest.raises(ImproperlyConfigured, match="NETWORKS"):
        Env({"NETWORKS": text}).networks("NETWORKS")


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_a_count_that_is_not_above_0_names_the_variable(text):
    with pytest.raises(ImproperlyConfigured, match=f"THREADS must be a whole number.*'{text}'"):
        Env({"THREADS": text}).count("THREADS", 1)


def test_a_count_is_read_and_has_a_default():
    env = Env({"THREADS": "1"})
    assert env.count("THREADS", 2) == 1
    assert env.count("OTHERS", 2) == 2
