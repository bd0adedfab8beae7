#!/usr/bin/env bash
# What only a GPU shows: the tests of what runs there, and its benchmark.
# PYTHON: an interpreter whose torch sees the GPU, .venv's by default. WHEELS: a folder with wheels of what it lacks.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if [ -n "${WHEELS:-}" ]; then "$python" -m pip install --no-index --no-deps "$WHEELS"/*.whl; fi
"$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch sees no GPU; give PYTHON one that does")'
"$python" -m pytest -q -c /dev/null --rootdir . --noconftest tests/rl_core/delta/test_device.py
"$python" -m benchmarks device
