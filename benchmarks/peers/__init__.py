"""Peers that run in an environment of their own (`make bench-peers`); nothing here imports the rest of Slipway."""
