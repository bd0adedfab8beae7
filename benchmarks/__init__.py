"""Benchmarks: `python -m benchmarks NAME [--quick]` prints one JSON object on its last line.

A benchmark is a module `benchmarks/NAME.py` with `run(*, quick, progress)`, which returns flat keys.
"""
