"""Machine code that is kept on disk is that of the sources as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
INNER = "from rl_core.delta.compiled import compiled\n\n@compiled\ndef number():\n    return {number}\n"
OUTER = """from rl_core.delta.compiled import compiled
from rl_core.delta.inner import number

@compiled
def answer():
    return number()
"""


def test_a_change_in_a_file_reaches_the_loops_of_others(tmp_path: Path) -> None:
    """A loop has those that it calls compiled into itself: numba would go on with the old ones for ever."""
    package = tmp_path / "rl_core"
    (package / "delta").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "delta" / "__init__.py").touch()
    shutil.copy(ROOT / "rl_core/delta/compiled.py", package / "delta")
    (package / "delta" / "outer.py").write_text(OUTER)
    answers = []
    for number in (1, 1, 2):
        (package / "delta" / "inner.py").write_text(INNER.format(number=number))
        command = [sys.executable, "-c", "from rl_core.delta.outer import answer; print(answer())"]
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
        done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
        answers.append(int(done.stdout))
    assert answers == [1, 1, 2]
    assert list((tmp_path / "kept").rglob("*.nbc"))  # kept it is
