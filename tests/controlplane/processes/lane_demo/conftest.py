"""The gateway's fixtures: a served lane in front of a real engine."""

from tests.controlplane.gateway.conftest import bare, engine, folder, served, world

__all__ = ["bare", "engine", "folder", "served", "world"]
