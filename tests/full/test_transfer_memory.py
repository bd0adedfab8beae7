"""What a transfer holds beyond the versions that must exist: a tenth of the model, and three frames a thread."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.delta.manifest import FRAME_BYTES

pytestmark = pytest.mark.full


@pytest.mark.parametrize("threads", [1, 2])
def test_beyond_two_versions_a_transfer_holds_little(threads: int) -> None:
    script = Path(__file__).with_name("transfer_memory.py")
    done = subprocess.run([sys.executable, str(script), str(threads)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    full_bytes = found.pop("full_bytes")
    bound = full_bytes // 10 + 3 * FRAME_BYTES * threads
    shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in found.items())
    print(f"{threads} threads, of {bound / 2**20:.1f} MiB allowed: {shown}")  # noqa: T201 (drills tell)
    assert sorted(found) == [
        "derive_fp8-block", "derive_nvfp4", "publish_delta", "publish_snapshot", "receive_delta", "receive_snapshot",
    ]  # fmt: skip
    assert all(size > 0 for name, size in found.items() if not name.startswith("derive_")), shown
    assert all(size <= bound for size in found.values()), shown
