"""Compiled loops check no bounds of their own: here they do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_compiled_loops_stay_inside_their_arrays(tmp_path):
    here = Path(__file__).parent
    files = [str(here / name) for name in ("test_codec.py", "test_golden.py")]
    checked = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *files], env=checked, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert list(tmp_path.rglob("detection.find-*.nbc"))  # compiled anew, with the checks
