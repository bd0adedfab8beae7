"""Endpoints, one module per area."""
