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
